//! What is wrong with a configuration, where, and what to do.

use std::fmt;
use std::path::PathBuf;

use super::value::Value;

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nobody set it.
    Default,
    /// A line of the file.
    File(PathBuf, usize),
    /// An argument.
    CommandLine(String),
    /// Another process of the job.
    Json,
}

/// One thing that is wrong.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// The file cannot be read.
    #[error("cannot read the configuration {file}: {error}", file = .file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// The file is not TOML, or the JSON is not a configuration.
    #[error("{origin}: {detail}")]
    Syntax {
        /// The place.
        origin: Origin,
        /// What the parser says.
        detail: String,
    },
    /// A key that neither elastic nor torchtitan has.
    #[error("{origin}: there is no key {key}{hint}")]
    Unknown {
        /// The place.
        origin: Origin,
        /// The key as written.
        key: String,
        /// The nearest key, as a sentence.
        hint: String,
    },
    /// A torchtitan key with a value that elastic does not have.
    #[error("{origin}: {key} = {value}: only {only} is supported by this version{hint}")]
    Unsupported {
        /// The place.
        origin: Origin,
        /// The key.
        key: String,
        /// The value.
        value: Value,
        /// What is accepted.
        only: String,
        /// What to do instead.
        hint: String,
    },
    /// A value of another type, outside the range or no choice.
    #[error("{origin}: {key} = {value}: must be {expected}")]
    Value {
        /// The place.
        origin: Origin,
        /// The key.
        key: String,
        /// The value.
        value: Value,
        /// Type and range.
        expected: String,
    },
    /// The same key twice, possibly under two names.
    #[error("{origin}: {key} is already set by {before}: keep one of them")]
    Twice {
        /// The place.
        origin: Origin,
        /// The key.
        key: String,
        /// The first place.
        before: Origin,
    },
    /// An argument that is no override, or lacks its value.
    #[error("{argument}: {detail}")]
    Argument {
        /// The argument as written.
        argument: String,
        /// What to write.
        detail: String,
    },
    /// Keys that do not fit together.
    #[error("{0}")]
    Conflict(String),
}

/// Everything that is wrong with a configuration, one line each.
#[derive(Debug)]
pub struct ConfigError(pub Vec<Problem>);

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.0.iter().enumerate() {
            write!(f, "{}{problem}", if i == 0 { "" } else { "\n" })?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}

impl From<Problem> for ConfigError {
    fn from(problem: Problem) -> Self {
        Self(vec![problem])
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(file, line) => write!(f, "{}:{line}", file.display()),
            Self::CommandLine(argument) => write!(f, "command line ({argument})"),
            Self::Json => f.write_str("JSON"),
        }
    }
}
