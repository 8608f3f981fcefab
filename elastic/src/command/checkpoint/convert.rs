//! The conversions, with a progress bar each.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dcp::convert::{
    self, Difference, Report, Source, TorchFile, cast, diff, llama, to_dcp, to_safetensors,
    to_safetensors_folder, to_torch,
};
use dcp::{Checkpoint, Dtype};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::cli::{CkptCommand, ExportDtype, FromHfArgs, HfModel, ToHfArgs};
use crate::command::print::{bytes, grouped};
use crate::command::{fail, print};
use crate::exit::Exit;

use super::{Error, newest};

/// Runs a conversion or a comparison.
pub(super) fn run(command: CkptCommand) -> Exit {
    let done = match command {
        CkptCommand::Diff { first, second } => return compare(&first, &second),
        CkptCommand::Reshard { source, target, ranks } => converted(&target, |progress| {
            Ok(to_dcp(&verified(&source)?, &target, ranks, progress)?)
        }),
        CkptCommand::DcpToTorch { source, target } => {
            converted(&target, |progress| Ok(to_torch(&verified(&source)?, &target, progress)?))
        }
        CkptCommand::TorchToDcp { source, target, ranks } => converted(&target, |progress| {
            Ok(to_dcp(&TorchFile::open(&source)?, &target, ranks, progress)?)
        }),
        CkptCommand::ToHf(args) => converted(&args.target, |progress| to_hf(&args, progress)),
        CkptCommand::FromHf(args) => converted(&args.target, |progress| from_hf(&args, progress)),
        CkptCommand::ToSafetensors { source, target, export_dtype } => {
            converted(&target, |progress| {
                let source = any(&source)?;
                let source = cast(&*source, export_dtype.map(dtype));
                Ok(to_safetensors(&source, &target, progress)?)
            })
        }
        CkptCommand::Ls { .. } | CkptCommand::Verify { .. } | CkptCommand::Show(_) => Ok(()),
    };
    done.map_or_else(|error| fail(Exit::Failed, &error), |()| Exit::Finished)
}

/// Converts, and says what was written.
fn converted(
    target: &Path,
    work: impl FnOnce(convert::Progress<'_>) -> Result<Report, Error>,
) -> Result<(), Error> {
    let started = Instant::now();
    let bar = bar();
    let report = work(&mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    })?;
    bar.finish_and_clear();
    if let Some(note) = left_out(&report.skipped) {
        eprintln!("elastic: note: {note}");
    }
    print(&format!(
        "{}: {} tensors, {}, {} objects, in {:.1} s\n",
        target.display(),
        grouped(report.tensors as u64),
        bytes(report.bytes),
        grouped(report.objects as u64),
        started.elapsed().as_secs_f64(),
    ));
    Ok(())
}

/// Says what the format had no place for, in one line whatever there is.
fn left_out(skipped: &[String]) -> Option<String> {
    let (first, rest) = skipped.split_first()?;
    let (others, (are, them)) = match rest.len() {
        0 => (String::new(), ("is", "it")),
        others => (format!(" and {} others", grouped(others as u64)), ("are", "them")),
    };
    Some(format!("{first}{others} {are} left out, the format has no place for {them}"))
}

/// Shown on a terminal, once a conversion takes longer than a blink.
fn bar() -> ProgressBar {
    let bar = ProgressBar::hidden();
    if std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(10));
        let style = ProgressStyle::with_template(
            "{wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}",
        );
        if let Ok(style) = style {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(200));
    }
    bar
}

/// A checkpoint whose bytes are known to be what was saved: pieces of shards
/// are not checked when they are read.
fn verified(path: &Path) -> Result<Checkpoint, Error> {
    let checkpoint = Checkpoint::open(&newest(path)?)?;
    checkpoint.verify()?;
    Ok(checkpoint)
}

/// A checkpoint, or a file of torch.save.
fn any(path: &Path) -> Result<Box<dyn Source>, Error> {
    if path.is_file() {
        return Ok(Box::new(TorchFile::open(path)?));
    }
    Ok(Box::new(verified(path)?))
}

fn dtype(export: ExportDtype) -> Dtype {
    match export {
        ExportDtype::Float32 => Dtype::F32,
        ExportDtype::Float16 => Dtype::F16,
        ExportDtype::Bfloat16 => Dtype::BF16,
    }
}

fn to_hf(args: &ToHfArgs, progress: convert::Progress<'_>) -> Result<Report, Error> {
    let source = verified(&args.source)?;
    let renamed = llama::to_hf(&source, heads(&args.model, None)?)?;
    let cast = cast(&renamed, args.export_dtype.map(dtype));
    let extra = args.model.hf_assets_path.as_deref().map(assets).transpose()?.unwrap_or_default();
    Ok(to_safetensors_folder(&cast, &args.target, args.max_shard_size, &extra, progress)?)
}

fn from_hf(args: &FromHfArgs, progress: convert::Progress<'_>) -> Result<Report, Error> {
    let source = verified(&args.source)?;
    let renamed = llama::from_hf(&source, heads(&args.model, Some(&args.source))?)?;
    Ok(to_dcp(&renamed, &args.target, args.ranks, progress)?)
}

/// Query heads of the model that is meant.
fn heads(model: &HfModel, source: Option<&Path>) -> Result<u64, Error> {
    if let Some(heads) = model.heads {
        return Ok(heads);
    }
    let folders = [model.hf_assets_path.as_deref(), source];
    for file in folders.into_iter().flatten().map(|folder| folder.join("config.json")) {
        if !file.is_file() {
            continue;
        }
        let wrong = |detail: String| Error::Config { path: file.clone(), detail };
        let text = std::fs::read(&file).map_err(|error| wrong(error.to_string()))?;
        let config: serde_json::Value =
            serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        let heads = config.get("num_attention_heads").and_then(serde_json::Value::as_u64);
        return heads.ok_or_else(|| wrong("has no num_attention_heads".to_owned()));
    }
    match model.model_flavor.as_deref() {
        Some("debugmodel") => Ok(16),
        Some("8B") => Ok(32),
        Some("70B") => Ok(64),
        Some("405B") => Ok(128),
        _ => Err(Error::Heads),
    }
}

/// What Hugging Face's programs need beside the weights.
fn assets(folder: &Path) -> Result<Vec<(String, Vec<u8>)>, Error> {
    const NAMES: [&str; 6] = [
        "config.json",
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
    ];
    let there = NAMES.map(|name| (name, folder.join(name))).into_iter();
    there
        .filter(|(_, path)| path.is_file())
        .map(|(name, path)| {
            let read = std::fs::read(&path).map_err(|error| Error::Io { path, error });
            Ok((name.to_owned(), read?))
        })
        .collect()
}

fn compare(first: &Path, second: &Path) -> Exit {
    match differences(first, second) {
        Ok(found) if found.is_empty() => {
            print("no difference\n");
            Exit::Finished
        }
        Ok(found) => {
            print(&found.iter().map(|difference| told(difference) + "\n").collect::<String>());
            Exit::Failed
        }
        Err(error) => fail(Exit::Failed, &error),
    }
}

fn differences(first: &Path, second: &Path) -> Result<Vec<Difference>, Error> {
    let path = |path: &Path| -> Result<PathBuf, Error> {
        if path.is_file() { Ok(path.to_owned()) } else { newest(path) }
    };
    let (first, second) = (any(&path(first)?)?, any(&path(second)?)?);
    let bar = bar();
    let found = diff(&*first, &*second, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    })?;
    bar.finish_and_clear();
    Ok(found)
}

fn told(difference: &Difference) -> String {
    match difference {
        Difference::OnlyFirst(fqn) => format!("{fqn}: only in the first"),
        Difference::OnlySecond(fqn) => format!("{fqn}: only in the second"),
        Difference::Kind { fqn, first, second } => format!("{fqn}: {first} and {second}"),
        Difference::Value(fqn) => format!("{fqn}: other values"),
        Difference::Elements { fqn, differing, elements, largest } => {
            let (differing, elements) = (grouped(*differing), grouped(*elements));
            let by = largest.map_or_else(String::new, |by| format!(", by {by:e} at most"));
            format!("{fqn}: {differing} of {elements} elements differ{by}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_takes_one_line() {
        let names = |count: usize| (0..count).map(|n| format!("o{n}")).collect::<Vec<_>>();
        assert_eq!(left_out(&[]), None);
        let told = |count| left_out(&names(count)).unwrap_or_default();
        assert!(told(1).ends_with("o0 is left out, the format has no place for it"), "{}", told(1));
        assert!(told(1_001).starts_with("o0 and 1,000 others are left out, "), "{}", told(1_001));
    }
}
