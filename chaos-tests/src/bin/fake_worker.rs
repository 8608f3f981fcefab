//! A worker without libtorch, for `--elastic.worker_bin`: see [`chaos_tests::fake`].

use std::process::ExitCode;

fn main() -> ExitCode {
    elastic::log::to(std::io::stderr);
    actors::worker::run(chaos_tests::fake::FakeFactory)
}
