//! Puts libtorch's folder into the run path of this crate's tests: torch-sys
//! sets it for itself only, and a dependant's binaries would not find it.

fn main() {
    println!("cargo::rerun-if-env-changed=DEP_TCH_LIBTORCH_LIB");
    if let Ok(folder) = std::env::var("DEP_TCH_LIBTORCH_LIB") {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{folder}");
    }
}
