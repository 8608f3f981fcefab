//! Checkpoints in S3, as a real server speaks it: moto on the loopback, started
//! by the test. `ELASTIC_TEST_S3` names its program, as `make test-object-store`
//! arranges.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dcp::storage::Remote;
use dcp::{Checkpoint, Dir, Dtype, Region, Storage};

#[path = "suite/storage.rs"]
#[allow(dead_code, reason = "shared with the other tests")]
mod storage;
#[path = "suite/support.rs"]
#[allow(dead_code, reason = "shared with the other tests")]
mod support;
use support::Tensor;

/// A server with one bucket, which ends with the test.
struct Server {
    process: Child,
    port: u16,
}

impl Server {
    fn start() -> Self {
        let program = std::env::var_os("ELASTIC_TEST_S3").unwrap_or_else(|| {
            panic!("ELASTIC_TEST_S3 names no moto_server: run `make test-object-store`")
        });
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let process = Command::new(program)
            .args(["-H", "127.0.0.1", "-p", &port.to_string()])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let server = Self { process, port };
        let until = Instant::now() + Duration::from_secs(60);
        while !server.make_bucket() {
            assert!(Instant::now() < until, "moto_server does not answer");
            std::thread::sleep(Duration::from_millis(200));
        }
        server
    }

    fn make_bucket(&self) -> bool {
        let Ok(mut stream) = TcpStream::connect(("127.0.0.1", self.port)) else { return false };
        let request = "PUT /bucket HTTP/1.0\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n";
        let mut said = String::new();
        stream.write_all(request.as_bytes()).is_ok()
            && stream.read_to_string(&mut said).is_ok()
            && said.contains(" 200 ")
    }

    fn open(&self, prefix: &str) -> Arc<dyn Storage> {
        let options = [
            ("aws_endpoint", format!("http://127.0.0.1:{}", self.port)),
            ("AWS_ALLOW_HTTP", "true".into()),
            ("aws_access_key_id", "test".into()),
            ("aws_secret_access_key", "test".into()),
            ("aws_region", "us-east-1".into()),
            ("home", "/".into()),
        ];
        let options = options.map(|(key, value)| (key.to_owned(), value));
        Arc::new(Remote::open(&format!("s3://bucket/{prefix}"), options).unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn s3_keeps_the_promises_of_a_storage() {
    let server = Server::start();
    storage::check(&*server.open("run"));
    // Several parts, in flight together.
    let storage = server.open("large");
    let bytes: Vec<u8> = (0..50_000_000u32).map(|n| (n % 253) as u8).collect();
    let mut upload = storage.create("x").unwrap();
    upload.write(&bytes).unwrap();
    assert!(!storage.exists("x").unwrap(), "an unfinished upload is visible");
    upload.finish().unwrap();
    let mut into = vec![0; bytes.len()];
    let object = storage.open("x").unwrap();
    object.read_at(0, &mut into).unwrap();
    assert_eq!(into, bytes);
    // An object that changed under the reader is no data.
    storage.replace("x", b"other").unwrap();
    assert!(object.read_at(0, &mut into).is_err());
    // An upload that is given up leaves nothing.
    let mut upload = storage.create("y").unwrap();
    upload.write(&bytes).unwrap();
    drop(upload);
    assert!(!storage.exists("y").unwrap());
}

#[test]
fn a_checkpoint_in_s3() {
    let server = Server::start();
    let scratch = tempfile::tempdir().unwrap();
    support::save(scratch.path(), 7);
    let dir = Dir::new(server.open("run"), ".stage-0-1-7");
    for entry in std::fs::read_dir(scratch.path()).unwrap() {
        let entry = entry.unwrap();
        let mut upload = dir.create(entry.file_name().to_str().unwrap()).unwrap();
        upload.write(&std::fs::read(entry.path()).unwrap()).unwrap();
        upload.finish().unwrap();
    }
    let (name, shape) = ("tok_embeddings.weight.7", [7, 6]);
    let tensor = Tensor::new(name, Dtype::F32, &shape);
    let checkpoint = Checkpoint::open_in(dir.clone()).unwrap();
    assert!(checkpoint.verify().unwrap().shards == 4);
    for region in [
        Region::whole(&shape),
        Region { offsets: vec![2, 0], sizes: vec![4, 6] },
        Region { offsets: vec![1, 3], sizes: vec![5, 2] },
    ] {
        assert_eq!(checkpoint.read_vec(name, &region).unwrap(), tensor.region(&region), "{region}");
    }
    dir.remove("__1_0.distcp").unwrap();
    let told = Checkpoint::open_in(dir).unwrap().verify().unwrap_err();
    assert!(told.is_damage());
    let told = told.to_string();
    assert!(told.contains("s3://bucket/run/.stage-0-1-7/__1_0.distcp"), "{told}");
}
