//! The linker drops `libtorch_cuda` from a program that names none of its
//! symbols, and CUDA is then absent without a word. Loading it at start, where
//! it is installed, lets one program serve both kinds of machine.

/// Says in the log whether this machine's GPUs are used.
pub(crate) fn find() {
    if std::path::Path::new("/dev/nvidia0").exists() {
        tracing::warn!(
            "this machine has a GPU, and this version computes on the CPU: bits and speed are the CPU's"
        );
    }
}
