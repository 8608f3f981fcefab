//! What the folder can do: the same bytes, without a format, checksums or
//! digests, by two threads.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

/// Bytes of one system call.
const PIECE: usize = 1 << 20;

/// Seconds to write two files, and to wait until they are on the disk.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<f64, String> {
    let told = |error: io::Error| format!("cannot write {}: {error}", path.display());
    std::fs::create_dir(path).map_err(told)?;
    let started = Instant::now();
    let half = |name: &str, bytes: &[u8]| {
        let mut file = File::create_new(path.join(name))?;
        bytes.chunks(PIECE).try_for_each(|piece| file.write_all(piece))?;
        file.sync_all()
    };
    let (first, second) = bytes.split_at(bytes.len() / 2);
    in_two(|| half("0", first), || half("1", second)).map_err(told)?;
    Ok(started.elapsed().as_secs_f64())
}

/// Seconds to read all data files of a checkpoint into memory that is there.
pub(super) fn read(path: &Path) -> Result<f64, String> {
    let told = |error: io::Error| format!("cannot read {}: {error}", path.display());
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).map_err(told)? {
        let path = entry.map_err(told)?.path();
        if path.extension().is_some_and(|extension| extension == "distcp") {
            let file = File::open(path).map_err(told)?;
            let length = file.metadata().map_err(told)?.len() as usize;
            files.push((file, vec![1; length]));
        }
    }
    files.sort_by_key(|(_, memory)| std::cmp::Reverse(memory.len()));
    let started = Instant::now();
    let (mut even, mut odd) = (Vec::new(), Vec::new());
    for (n, (file, memory)) in files.iter_mut().enumerate() {
        let half = (memory.len() / 2).next_multiple_of(PIECE).min(memory.len());
        let (first, second) = memory.split_at_mut(half);
        // Two threads, whatever the number of files.
        let [one, other] = if n % 2 == 0 { [&mut even, &mut odd] } else { [&mut odd, &mut even] };
        let at = first.len() as u64;
        one.push((&*file, 0, first));
        other.push((&*file, at, second));
    }
    let work = |parts: Vec<(&File, u64, &mut [u8])>| {
        parts.into_iter().try_for_each(|(file, at, memory)| {
            (0..)
                .zip(memory.chunks_mut(PIECE))
                .try_for_each(|(n, piece)| file.read_exact_at(piece, at + n * PIECE as u64))
        })
    };
    in_two(|| work(even), || work(odd)).map_err(told)?;
    Ok(started.elapsed().as_secs_f64())
}

fn in_two(
    one: impl FnOnce() -> io::Result<()> + Send,
    other: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    std::thread::scope(|scope| {
        let one = scope.spawn(one);
        let other = other();
        one.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)).and(other)
    })
}
