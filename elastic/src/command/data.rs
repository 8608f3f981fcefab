//! `elastic data prepare`: texts become token files (format: [`job::tokens`]).
//!
//! Everything is written beside its final name and renamed when it is durable,
//! `dataset.json` last: an interrupted run leaves the old dataset or one that
//! its digest refuses, never half of one that looks whole.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use job::tokens::{
    DATASET_FILE, Dataset, HEADER_BYTES, Header, Source, TRAIN_FILE, Tokenizer, VALIDATION_FILE,
    Width, digest,
};
use sha2::{Digest, Sha256};

use super::print::grouped;
use super::{fail, print};
use crate::cli::PrepareArgs;
use crate::exit::Exit;

/// Runs the command.
pub(super) fn prepare(args: &PrepareArgs) -> Exit {
    match write(args) {
        Ok(dataset) => {
            print(&format!(
                "{}: {} tokens to train on, {} to validate on, from {} {}; digest {}\n",
                args.out.display(),
                grouped(dataset.train_tokens),
                grouped(dataset.validation_tokens),
                dataset.sources.len(),
                if dataset.sources.len() == 1 { "text" } else { "texts" },
                dataset.digest,
            ));
            Exit::Finished
        }
        Err(error) => fail(error.exit(), &error),
    }
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot read the text {}: {error}", .path.display())]
    Read { path: PathBuf, error: io::Error },
    #[error("the text {} is {what}", .path.display())]
    NoText { path: PathBuf, what: &'static str },
    #[error("the text {} changed while it was read: {expected} bytes became {actual}", .path.display())]
    Changed { path: PathBuf, expected: u64, actual: u64 },
    #[error("cannot create the folder {}: {error}", .path.display())]
    Folder { path: PathBuf, error: io::Error },
    #[error("cannot write {}: {error}", .path.display())]
    Write { path: PathBuf, error: io::Error },
}

impl Error {
    /// What another command line mends is refused before anything is written.
    fn exit(&self) -> Exit {
        match self {
            Self::Read { .. } | Self::NoText { .. } | Self::Folder { .. } => Exit::Usage,
            Self::Changed { .. } | Self::Write { .. } => Exit::Failed,
        }
    }
}

fn write(args: &PrepareArgs) -> Result<Dataset, Error> {
    // All texts are looked at before anything is written.
    let lengths = args.texts.iter().map(|text| length(text)).collect::<Result<Vec<_>, _>>()?;
    let at = |error, path: &Path| Error::Write { path: path.to_owned(), error };
    fs::create_dir_all(&args.out)
        .map_err(|error| Error::Folder { path: args.out.clone(), error })?;

    let mut train = TokenFile::create(&args.out, TRAIN_FILE)?;
    let mut validation = TokenFile::create(&args.out, VALIDATION_FILE)?;
    let mut sources = Vec::new();
    for (text, bytes) in args.texts.iter().zip(lengths) {
        let held_out = (bytes as f64 * args.validation_fraction) as u64;
        let mut whole = Sha256::new();
        let mut file =
            File::open(text).map_err(|error| Error::Read { path: text.clone(), error })?;
        train.copy(text, &mut file, bytes - held_out, &mut whole)?;
        validation.copy(text, &mut file, held_out, &mut whole)?;
        sources.push(Source {
            name: text.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            bytes,
            sha256: hex::encode(whole.finalize()),
        });
    }

    let (train, validation) = (train.finish()?, validation.finish()?);
    let dataset = Dataset {
        digest: hex::encode(digest(&train.header, &validation.header)),
        tokenizer: Tokenizer::Byte,
        vocab_size: VOCABULARY,
        train_tokens: train.header.count,
        validation_tokens: validation.header.count,
        sources,
    };
    let mut described = Draft::create(&args.out, DATASET_FILE)?;
    serde_json::to_writer_pretty(&described.file, &dataset)
        .map_err(|error| at(error.into(), &described.name))?;
    described.put(b"\n")?;
    train.draft.publish()?;
    validation.draft.publish()?;
    described.publish()?;
    File::open(&args.out)
        .and_then(|folder| folder.sync_all())
        .map_err(|error| at(error, &args.out))?;
    Ok(dataset)
}

/// Length of a text that can become tokens.
fn length(text: &Path) -> Result<u64, Error> {
    let no_text = |what| Error::NoText { path: text.to_owned(), what };
    let file = File::open(text).map_err(|error| Error::Read { path: text.to_owned(), error })?;
    let facts = file.metadata().map_err(|error| Error::Read { path: text.to_owned(), error })?;
    if facts.is_dir() {
        return Err(no_text("a folder: name the files in it"));
    }
    if !facts.is_file() {
        return Err(no_text("no regular file: save it to one first"));
    }
    if facts.len() == 0 {
        return Err(no_text("empty: leave it out"));
    }
    Ok(facts.len())
}

/// Of the byte tokenizer.
const VOCABULARY: u64 = 256;

/// A file that has its name only when it is complete.
struct Draft {
    file: File,
    draft: PathBuf,
    name: PathBuf,
}

impl Draft {
    fn create(folder: &Path, name: &str) -> Result<Self, Error> {
        let draft = folder.join(format!(".{name}.{}", std::process::id()));
        let file =
            File::create(&draft).map_err(|error| Error::Write { path: draft.clone(), error })?;
        Ok(Self { file, draft, name: folder.join(name) })
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.file.write_all(bytes).map_err(|error| self.failed(error))
    }

    fn publish(self) -> Result<(), Error> {
        self.file
            .sync_all()
            .and_then(|()| fs::rename(&self.draft, &self.name))
            .map_err(|error| self.failed(error))
    }

    fn failed(&self, error: io::Error) -> Error {
        Error::Write { path: self.name.clone(), error }
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // After `publish` there is nothing left under that name.
        let _ = fs::remove_file(&self.draft);
    }
}

/// A token file in the making: its header is written last.
struct TokenFile {
    draft: Draft,
    count: u64,
    payload: Sha256,
}

struct Finished {
    draft: Draft,
    header: Header,
}

impl TokenFile {
    fn create(folder: &Path, name: &str) -> Result<Self, Error> {
        let mut draft = Draft::create(folder, name)?;
        draft.put(&[0; HEADER_BYTES])?;
        Ok(Self { draft, count: 0, payload: Sha256::new() })
    }

    /// Appends the next `bytes` bytes of `file`.
    fn copy(
        &mut self,
        text: &Path,
        file: &mut File,
        bytes: u64,
        whole: &mut Sha256,
    ) -> Result<(), Error> {
        let mut buffer = vec![0; 1 << 20];
        let mut left = bytes;
        while left > 0 {
            let want = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let read = match file.read(&mut buffer[..want]) {
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(Error::Read { path: text.to_owned(), error }),
            };
            if read == 0 {
                let actual = bytes - left;
                return Err(Error::Changed { path: text.to_owned(), expected: bytes, actual });
            }
            let chunk = &buffer[..read];
            whole.update(chunk);
            self.payload.update(chunk);
            self.draft.put(chunk)?;
            left -= read as u64;
        }
        self.count += bytes;
        Ok(())
    }

    fn finish(mut self) -> Result<Finished, Error> {
        let header = Header {
            width: Width::One,
            vocab_size: VOCABULARY,
            count: self.count,
            payload_sha256: self.payload.finalize().into(),
        };
        self.draft.file.seek(SeekFrom::Start(0)).map_err(|error| self.draft.failed(error))?;
        self.draft.put(&header.encode())?;
        Ok(Finished { draft: self.draft, header })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Case {
        folder: tempfile::TempDir,
        args: PrepareArgs,
    }

    fn case(texts: &[(&str, &[u8])], share: f64) -> Case {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let texts = texts
            .iter()
            .map(|(name, bytes)| {
                let path = folder.path().join(name);
                fs::write(&path, bytes).expect("a temporary file");
                path
            })
            .collect();
        let out = folder.path().join("deep/data");
        let args = PrepareArgs { texts, out, validation_fraction: share, tokenizer: "byte".into() };
        Case { folder, args }
    }

    /// Prepares and compares the payloads.
    #[track_caller]
    fn check(texts: &[(&str, &[u8])], share: f64, train: &[u8], validation: &[u8]) {
        let case = case(texts, share);
        let dataset = write(&case.args).expect("good texts");
        let headers =
            [(TRAIN_FILE, train), (VALIDATION_FILE, validation)].map(|(name, payload)| {
                let file = fs::read(case.args.out.join(name)).expect("a token file");
                let header = Header::decode(&file, file.len() as u64).expect("a sound header");
                assert_eq!(&file[HEADER_BYTES..], payload, "{name}");
                assert_eq!(header.payload_sha256, <[u8; 32]>::from(Sha256::digest(payload)));
                header
            });
        let described = fs::read(case.args.out.join(DATASET_FILE)).expect("a description");
        let described: Dataset = serde_json::from_slice(&described).expect("JSON");
        assert_eq!(described, dataset);
        assert_eq!(described.digest, hex::encode(digest(&headers[0], &headers[1])));
        let files = fs::read_dir(&case.args.out).expect("a folder").count();
        assert_eq!(files, 3, "no drafts are left");
    }

    /// Prepares and compares the message.
    #[track_caller]
    fn refuse(case: &Case, expected: &str) {
        let error = write(&case.args).expect_err(expected).to_string();
        let folder = format!("{}/", case.folder.path().display());
        assert_eq!(error.replace(&folder, ""), expected);
    }

    #[test]
    fn bytes_stay_as_they_are_in_the_order_given() {
        check(&[("b", b"0123456789"), ("a", b"abcdefghij")], 0.2, b"01234567abcdefgh", b"89ij");
        check(&[("latin", b"\xe9\x00\xff\r\n")], 0.0, b"\xe9\x00\xff\r\n", b"");
        check(&[("x", b"xyz")], 0.99, b"x", b"yz");
    }

    #[test]
    fn the_same_texts_give_the_same_files() {
        let of = || {
            let case = case(&[("one", &[b'a'; 3_000_000]), ("two", b"b")], 0.05);
            write(&case.args).expect("good texts")
        };
        assert_eq!(of(), of());
    }

    #[test]
    fn a_bad_text_is_one_clear_line_and_leaves_nothing() {
        let mut missing = case(&[("good", b"text")], 0.05);
        missing.args.texts.push(missing.folder.path().join("missing"));
        refuse(&missing, "cannot read the text missing: No such file or directory (os error 2)");
        assert!(!missing.args.out.exists());

        refuse(&case(&[("empty", b"")], 0.05), "the text empty is empty: leave it out");

        let mut folder = case(&[], 0.05);
        fs::create_dir(folder.folder.path().join("books")).expect("a folder");
        folder.args.texts.push(folder.folder.path().join("books"));
        refuse(&folder, "the text books is a folder: name the files in it");

        let mut file = case(&[("good", b"text")], 0.05);
        file.args.out = file.args.texts[0].join("out");
        refuse(&file, "cannot create the folder good/out: Not a directory (os error 20)");
    }
}
