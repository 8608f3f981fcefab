//! Data that cannot be trained on is refused before anything is built for it.

use std::path::Path;

use elastic::config::Config;
use engine::data::TokenFile;
use job::tokens::{TRAIN_FILE, VALIDATION_FILE};

/// Checks the token files that a configuration needs.
///
/// # Errors
/// One line that names the folder or file and what to do.
pub(crate) fn check(config: &Config) -> Result<(), String> {
    let folder = Path::new(&config.training.dataset_path);
    if !folder.join(TRAIN_FILE).exists() {
        return Err(format!(
            "no dataset in {}: there is no {TRAIN_FILE}; make one with `elastic data prepare TEXT --out \
             DIR`, and name DIR by training.dataset_path",
            folder.display()
        ));
    }
    let mut files = vec![TRAIN_FILE];
    if config.validation.enable {
        files.push(VALIDATION_FILE);
    }
    for name in files {
        let path = folder.join(name);
        let file = TokenFile::open(&path).map_err(|error| error.to_string())?;
        let bytes = std::fs::metadata(&path).map_or(0, |metadata| metadata.len());
        if bytes <= VERIFIED_BYTES {
            file.verify().map_err(|error| error.to_string())?;
        }
    }
    Ok(())
}

/// Larger token files are checked by length alone: reading them through would
/// hold up every start.
const VERIFIED_BYTES: u64 = 256 << 20;
