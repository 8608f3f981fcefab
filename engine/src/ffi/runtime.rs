//! Process-wide settings that make libtorch's bits repeatable (TRAJ-1).

use std::{
    ffi::{c_int, c_void},
    sync::Once,
};

/// `MKL_CBWR_AUTO` of mkl_types.h: the fastest instruction set, with fixed
/// cache sizes, deterministic reductions and static scheduling.
const MKL_CBWR_AUTO: c_int = 2;

/// Sets one intra-op thread (a thread count changes how sums are split) and
/// MKL's conditional numerical reproducibility. Call before the first tensor.
pub(crate) fn prepare_libtorch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        reproducible_mkl();
        tch::set_num_threads(1);
    });
}

/// MKL is inside libtorch on x86 and absent elsewhere. `MKL_CBWR` in the
/// environment does the same, but a process that has threads must not set it.
fn reproducible_mkl() {
    if std::env::var_os("MKL_CBWR").is_some() {
        return;
    }
    // SAFETY: a look-up by a constant, NUL-terminated name.
    let symbol: *mut c_void =
        unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"mkl_serv_cbwr_set".as_ptr()) };
    if symbol.is_null() {
        return;
    }
    // SAFETY: this is MKL's `int mkl_cbwr_set(int)`, which its public header
    // maps to this symbol.
    let set =
        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int) -> c_int>(symbol) };
    // SAFETY: takes and returns plain integers; MKL allows it before its first use.
    let status = unsafe { set(MKL_CBWR_AUTO) };
    if status != 0 {
        tracing::warn!(status, "MKL refuses reproducible mode: set MKL_CBWR=AUTO");
    }
}
