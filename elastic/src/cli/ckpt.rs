//! Arguments of `elastic ckpt`. PyTorch's and torchtitan's own spellings of the
//! conversions are accepted too.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

/// Checkpoints.
#[derive(Debug, Subcommand)]
pub enum CkptCommand {
    /// List the checkpoints of a folder, or the tensors of one checkpoint.
    Ls {
        /// A checkpoint folder, or one step-N in it.
        dir: PathBuf,
    },
    /// Read every byte and compare all checksums and digests.
    Verify {
        /// A checkpoint folder, or one step-N in it.
        dir: PathBuf,
    },
    /// Show the tree of one checkpoint: types, shapes, bytes, values, digests.
    Show(ShowArgs),
    /// Say which tensors of two checkpoints differ, and by how much.
    ///
    /// Ends with 1 when they differ.
    Diff {
        /// A checkpoint: DCP, safetensors, or a file of torch.save.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
    /// Write a checkpoint again, as another number of ranks would have.
    Reshard {
        /// A checkpoint: DCP or safetensors.
        source: PathBuf,
        /// The new checkpoint.
        target: PathBuf,
        /// Ranks, each with a file of its own.
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
        ranks: u32,
    },
    /// Write a checkpoint as a single file, which torch.load reads.
    #[command(visible_alias = "dcp_to_torch")]
    DcpToTorch {
        /// A checkpoint.
        source: PathBuf,
        /// The new file.
        target: PathBuf,
    },
    /// Write a file of torch.save as a checkpoint.
    #[command(visible_alias = "torch_to_dcp")]
    TorchToDcp {
        /// A file that torch.save wrote.
        source: PathBuf,
        /// The new checkpoint.
        target: PathBuf,
        /// Ranks, each with a file of its own.
        #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65_536))]
        ranks: u32,
    },
    /// Write the model of a checkpoint as Hugging Face safetensors.
    #[command(aliases = ["convert_to_hf", "convert_to_hf.py"])]
    ToHf(ToHfArgs),
    /// Write a Hugging Face model as a checkpoint that training starts from.
    #[command(aliases = ["convert_from_hf", "convert_from_hf.py"])]
    FromHf(FromHfArgs),
    /// Write all tensors of a checkpoint into one safetensors file.
    #[command(alias = "to_safetensors")]
    ToSafetensors {
        /// A checkpoint, or a file of torch.save.
        source: PathBuf,
        /// The new file.
        target: PathBuf,
        /// Convert floating-point tensors.
        #[arg(long, alias = "export_dtype", value_name = "TYPE")]
        export_dtype: Option<ExportDtype>,
    },
}

/// Arguments of `elastic ckpt show`.
#[derive(Clone, Debug, Args)]
pub struct ShowArgs {
    /// A checkpoint, or a folder of them: then the newest.
    pub dir: PathBuf,
    /// One JSON object.
    #[arg(long)]
    pub json: bool,
    /// Read all tensors, and give the BLAKE3 of the elements of each.
    #[arg(long)]
    pub hash: bool,
}

/// Arguments of `elastic ckpt to-hf`.
#[derive(Clone, Debug, Args)]
pub struct ToHfArgs {
    /// A checkpoint, or a folder of them: then the newest.
    pub source: PathBuf,
    /// The new folder.
    pub target: PathBuf,
    /// The model.
    #[command(flatten)]
    pub model: HfModel,
    /// Convert floating-point tensors.
    #[arg(long, alias = "export_dtype", value_name = "TYPE")]
    pub export_dtype: Option<ExportDtype>,
    /// Bytes of a file of weights, at most.
    #[arg(long, alias = "max_shard_size", value_name = "BYTES", default_value_t = 5_000_000_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub max_shard_size: u64,
}

/// Arguments of `elastic ckpt from-hf`.
#[derive(Clone, Debug, Args)]
pub struct FromHfArgs {
    /// A folder with model.safetensors, or several with their index.
    pub source: PathBuf,
    /// The new checkpoint.
    pub target: PathBuf,
    /// The model.
    #[command(flatten)]
    pub model: HfModel,
    /// Ranks, each with a file of its own.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub ranks: u32,
}

/// Which Llama it is: rows of queries and keys are in another order in Hugging
/// Face's models, head by head.
#[derive(Clone, Debug, Args)]
pub struct HfModel {
    /// Query heads (num_attention_heads); without it, from the config.json of
    /// --hf-assets-path or of the source, or from --model-flavor.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=65_536))]
    pub heads: Option<u64>,
    /// Folder with the model's config.json; to-hf copies it and the tokenizer.
    #[arg(long, alias = "hf_assets_path", value_name = "DIR")]
    pub hf_assets_path: Option<PathBuf>,
    /// llama3 is the only one.
    #[arg(long, alias = "model_name", value_name = "NAME", default_value = "llama3", value_parser = ["llama3"])]
    pub model_name: String,
    /// debugmodel, 8B, 70B or 405B, as torchtitan calls them.
    #[arg(long, alias = "model_flavor", value_name = "NAME", value_parser = ["debugmodel", "8B", "70B", "405B"])]
    pub model_flavor: Option<String>,
}

/// Types that models are exported in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs, reason = "PyTorch's names")]
pub enum ExportDtype {
    Float32,
    Float16,
    Bfloat16,
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    #[track_caller]
    fn parse(line: &str) -> CkptCommand {
        let words = ["elastic", "ckpt"].into_iter().chain(line.split_whitespace());
        match Cli::try_parse_from(words).map(|cli| cli.command) {
            Ok(Command::Ckpt(command)) => command,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn spellings_of_pytorch_and_torchtitan_are_understood() {
        assert!(matches!(parse("dcp_to_torch a b.pt"), CkptCommand::DcpToTorch { .. }));
        assert!(matches!(parse("torch_to_dcp b.pt a"), CkptCommand::TorchToDcp { .. }));
        let line = "convert_to_hf.py in out --hf_assets_path assets --model_name llama3 \
                    --model_flavor 8B --export_dtype bfloat16";
        let CkptCommand::ToHf(args) = parse(line) else { panic!("another command") };
        assert_eq!(args.model.model_flavor.as_deref(), Some("8B"));
        assert_eq!(args.export_dtype, Some(ExportDtype::Bfloat16));
        let CkptCommand::FromHf(args) = parse("convert_from_hf in out --model_flavor debugmodel")
        else {
            panic!("another command")
        };
        assert_eq!(args.ranks, 1);
    }
}
