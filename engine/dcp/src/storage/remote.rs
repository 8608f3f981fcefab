//! S3, GCS and Azure, through the crate `object_store`.
//!
//! The crate's futures run on two threads of their own, so that callers need no
//! runtime and may themselves run in one. Requests are tried ten times within
//! three minutes, with pauses, and then fail; only what is safe to repeat is.

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, mpsc};

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{
    Error, GetOptions, ObjectStore, ObjectStoreExt, PutMode, PutPayload, WriteMultipart,
};
use tokio::runtime::{Builder, Runtime};

use super::beneath::check_key;
use super::{Object, Storage, Upload};
use crate::index::METADATA;

/// Bytes of a part of an upload: the 10,000 parts that stores allow make 160 GB.
const PART: usize = 16 << 20;
/// Parts on their way at once, besides the one that fills.
const IN_FLIGHT: usize = 2;
/// Requests at once, which hide the latency of each.
const REQUESTS: usize = 16;
/// What a store sends in the 20 ms that a request takes to begin.
const REQUEST_COST: u64 = 1 << 20;

/// The objects below a prefix of a bucket.
pub struct Remote {
    store: Arc<dyn ObjectStore>,
    prefix: Path,
    url: String,
}

impl Remote {
    /// Opens a URL, `s3://bucket/prefix`, `gs://…` or `az://…`. Options are
    /// those of the crate, such as `aws_endpoint` and `aws_access_key_id`, in
    /// either case and also by the names that the vendors' own tools take from
    /// the environment; unknown ones are ignored.
    ///
    /// # Errors
    /// For an unknown scheme, and when the store is not configured.
    pub fn open(
        url: &str,
        options: impl IntoIterator<Item = (String, String)>,
    ) -> io::Result<Self> {
        // The first provider stays; this is the one of the whole workspace.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let url = url.trim_end_matches('/').to_owned();
        let parsed = url::Url::parse(&url)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let (store, prefix) = object_store::parse_url_opts(&parsed, options).map_err(told)?;
        Ok(Self { store: store.into(), prefix, url })
    }

    fn object(&self, key: &str) -> io::Result<Path> {
        check_key(key)?;
        let names = key.split('/').filter(|name| !name.is_empty());
        Ok(names.fold(self.prefix.clone(), |path, name| path.join(name)))
    }
}

impl Storage for Remote {
    fn path(&self, key: &str) -> PathBuf {
        if key.is_empty() { self.url.clone() } else { format!("{}/{key}", self.url) }.into()
    }

    fn parallelism(&self) -> usize {
        REQUESTS
    }

    fn open(&self, key: &str) -> io::Result<Box<dyn Object>> {
        let (store, path) = (Arc::clone(&self.store), self.object(key)?);
        let (head, at) = (Arc::clone(&store), path.clone());
        let found = wait(async move { head.head(&at).await })?;
        Ok(Box::new(Opened { store, path, len: found.size, e_tag: found.e_tag }))
    }

    fn list(&self, folder: &str) -> io::Result<Vec<String>> {
        let (store, path) = (Arc::clone(&self.store), self.object(folder)?);
        let found = wait(async move { store.list_with_delimiter(Some(&path)).await })?;
        let objects = found.objects.into_iter().map(|object| object.location);
        let paths = found.common_prefixes.into_iter().chain(objects);
        let mut names: Vec<String> =
            paths.filter_map(|path| path.filename().map(str::to_owned)).collect();
        names.sort_unstable();
        Ok(names)
    }

    fn exists(&self, key: &str) -> io::Result<bool> {
        let (store, path) = (Arc::clone(&self.store), self.object(key)?);
        wait(async move {
            match store.head(&path).await {
                Err(Error::NotFound { .. }) => {}
                found => return found.map(|_| true),
            }
            Ok(store.list(Some(&path)).next().await.transpose()?.is_some())
        })
    }

    fn make_folder(&self, folder: &str) -> io::Result<()> {
        // Folders are the prefixes of objects.
        self.object(folder).map(|_| ())
    }

    fn create(&self, key: &str) -> io::Result<Box<dyn Upload>> {
        let path = self.object(key)?;
        // Large uploads cannot be exclusive everywhere; a stage has one writer.
        if self.exists(key)? {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let store = Arc::clone(&self.store);
        Ok(Box::new(Sending { store, path, filling: Vec::new(), sending: None }))
    }

    fn claim(&self, key: &str, bytes: &[u8]) -> io::Result<()> {
        let (store, path) = (Arc::clone(&self.store), self.object(key)?);
        let bytes = PutPayload::from(bytes.to_vec());
        wait(async move { store.put_opts(&path, bytes, PutMode::Create.into()).await.map(drop) })
    }

    fn replace(&self, key: &str, bytes: &[u8]) -> io::Result<()> {
        let (store, path) = (Arc::clone(&self.store), self.object(key)?);
        let bytes = PutPayload::from(bytes.to_vec());
        wait(async move { store.put(&path, bytes).await.map(drop) })
    }

    fn sync(&self, folder: &str) -> io::Result<()> {
        // What a put returned from is durable, name and all.
        self.object(folder).map(|_| ())
    }

    fn renames(&self) -> bool {
        false
    }

    fn rename(&self, _: &str, _: &str) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn remove(&self, key: &str) -> io::Result<()> {
        let (store, path) = (Arc::clone(&self.store), self.object(key)?);
        wait(async move {
            let gone = |done| match done {
                Err(Error::NotFound { .. }) => Ok(()),
                done => done,
            };
            for path in [path.clone().join(METADATA), path.clone()] {
                gone(store.delete(&path).await)?;
            }
            let below = store.list(Some(&path)).map_ok(|object| object.location).boxed();
            let mut removed = store.delete_stream(below);
            while let Some(one) = removed.next().await {
                gone(one.map(drop))?;
            }
            Ok(())
        })
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the store, which knows secrets.
        f.debug_tuple("Remote").field(&self.url).finish()
    }
}

/// An object of a known length; it may not change while it is read.
struct Opened {
    store: Arc<dyn ObjectStore>,
    path: Path,
    len: u64,
    e_tag: Option<String>,
}

impl Object for Opened {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let end = at.checked_add(into.len() as u64).filter(|&end| end <= self.len);
        let range: Range<u64> = at..end.ok_or(io::ErrorKind::UnexpectedEof)?;
        if range.is_empty() {
            return Ok(());
        }
        let (store, path, if_match) =
            (Arc::clone(&self.store), self.path.clone(), self.e_tag.clone());
        let options = GetOptions { range: Some(range.into()), if_match, ..GetOptions::default() };
        let bytes = wait(async move { store.get_opts(&path, options).await?.bytes().await })?;
        if bytes.len() != into.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        into.copy_from_slice(&bytes);
        Ok(())
    }

    fn request_cost(&self) -> u64 {
        REQUEST_COST
    }
}

/// An upload: in one piece when it is short, in parts otherwise. Nothing is
/// visible before it is finished.
struct Sending {
    store: Arc<dyn ObjectStore>,
    path: Path,
    filling: Vec<u8>,
    sending: Option<WriteMultipart>,
}

impl Sending {
    fn send(&mut self) -> io::Result<()> {
        let part = Bytes::from(std::mem::take(&mut self.filling));
        let (store, path, sending) =
            (Arc::clone(&self.store), self.path.clone(), self.sending.take());
        let sending = wait(async move {
            let mut sending = match sending {
                Some(sending) => sending,
                None => {
                    WriteMultipart::new_with_chunk_size(store.put_multipart(&path).await?, PART)
                }
            };
            if let Err(error) = sending.wait_for_capacity(IN_FLIGHT).await {
                // The parts cost money until they are removed; the error says more.
                let _ = sending.abort().await;
                return Err(error);
            }
            sending.put(part);
            Ok(sending)
        })?;
        self.sending = Some(sending);
        Ok(())
    }
}

impl Upload for Sending {
    fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(PART - self.filling.len()));
            self.filling.extend_from_slice(now);
            bytes = later;
            if self.filling.len() == PART {
                self.send()?;
            }
        }
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> io::Result<()> {
        if self.sending.is_none() {
            let bytes = PutPayload::from(std::mem::take(&mut self.filling));
            let (store, path) = (Arc::clone(&self.store), self.path.clone());
            return wait(async move {
                store.put_opts(&path, bytes, PutMode::Create.into()).await.map(drop)
            });
        }
        if !self.filling.is_empty() {
            self.send()?;
        }
        match self.sending.take() {
            Some(sending) => wait(async move { sending.finish().await.map(drop) }),
            None => Ok(()),
        }
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        if let (Some(sending), Ok(runtime)) = (self.sending.take(), runtime()) {
            runtime.spawn(sending.abort());
        }
    }
}

/// Runs a request to its end on the threads of this module.
fn wait<T: Send + 'static>(
    request: impl Future<Output = Result<T, Error>> + Send + 'static,
) -> io::Result<T> {
    let (done, result) = mpsc::sync_channel(1);
    runtime()?.spawn(async move { done.send(request.await) });
    result.recv().map_err(io::Error::other)?.map_err(told)
}

fn runtime() -> io::Result<&'static Runtime> {
    static RUNTIME: OnceLock<io::Result<Runtime>> = OnceLock::new();
    let build = || {
        Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("object-store")
            .enable_all()
            .build()
    };
    let runtime = RUNTIME.get_or_init(build).as_ref();
    runtime.map_err(|error| io::Error::new(error.kind(), error.to_string()))
}

fn told(error: Error) -> io::Error {
    let kind = match &error {
        Error::NotFound { .. } => io::ErrorKind::NotFound,
        Error::AlreadyExists { .. } => io::ErrorKind::AlreadyExists,
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
            io::ErrorKind::PermissionDenied
        }
        // Someone wrote another object of this name between two reads.
        Error::Precondition { .. } => io::ErrorKind::InvalidData,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}
