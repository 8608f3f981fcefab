//! The names that versions of torchtitan gave the same tensors of a Llama.
//!
//! | until July 2025 | v0.2.2, which is used here | 2026 |
//! |---|---|---|
//! | `model.` before each | | |
//! | `output.weight` | `output.weight` | `lm_head.weight` |
//! | `layers.N.attention.wq.weight` | the same | `layers.N.attention.qkv_linear.wq.weight` |
//!
//! The optimizer's keys hold the parameter's name in their middle.

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::checkpoint::Checkpoint;
use crate::error::Error;
use crate::index::Index;
use crate::value::{Segment, join};

/// The v0.2.2 name of a key of any version; other keys stay as they are.
#[must_use]
pub fn canonical(fqn: &str) -> Cow<'_, str> {
    for before in ["optimizer.state.", "optimizer.param_groups."] {
        if let Some(rest) = fqn.strip_prefix(before) {
            return match model(rest) {
                None => fqn.into(),
                Some(name) => format!("{before}{name}").into(),
            };
        }
    }
    model(fqn).map_or(fqn.into(), Cow::Owned)
}

/// The other name of a parameter, and of what follows it; `None` when it keeps
/// its own.
fn model(fqn: &str) -> Option<String> {
    let bare = fqn.strip_prefix("model.").filter(|rest| is_titan(rest)).unwrap_or(fqn);
    let name = if let Some(rest) = bare.strip_prefix("lm_head.") {
        format!("output.{rest}")
    } else if let Some((layer, rest)) = bare.split_once(".attention.qkv_linear.")
        && layer.starts_with("layers.")
    {
        format!("{layer}.attention.{rest}")
    } else {
        bare.to_owned()
    };
    (name != fqn).then_some(name)
}

/// Hugging Face too begins names with `model.`, but goes on in other words.
fn is_titan(name: &str) -> bool {
    if let Some(rest) = name.strip_prefix("layers.") {
        let parts = ["attention", "feed_forward", "attention_norm", "ffn_norm"];
        return rest.split('.').nth(1).is_some_and(|part| parts.contains(&part));
    }
    ["tok_embeddings.", "norm.", "output.", "lm_head."].iter().any(|start| name.starts_with(start))
}

impl Checkpoint {
    /// The same checkpoint under the names of torchtitan v0.2.2, whichever
    /// version saved it.
    ///
    /// # Errors
    /// [`Error::Entry`] when two keys are names of one tensor.
    pub fn with_torchtitan_names(mut self) -> Result<Self, Error> {
        let Index { tensors, objects, paths, files } = std::mem::take(&mut self.index);
        let index = Index {
            tensors: self.renamed(tensors)?,
            objects: self.renamed(objects)?,
            paths: self.renamed(paths)?,
            files,
        };
        self.index = index;
        for (fqn, path) in &mut self.index.paths {
            if join(path) != *fqn {
                *path = moved(path, fqn);
            }
        }
        Ok(self)
    }

    fn renamed<T>(&self, items: BTreeMap<String, T>) -> Result<BTreeMap<String, T>, Error> {
        let mut renamed = BTreeMap::new();
        for (fqn, item) in items {
            let name = canonical(&fqn).into_owned();
            if renamed.insert(name.clone(), item).is_some() {
                let detail = format!("is the name of {name} in another version of torchtitan");
                return Err(Error::Entry { path: self.dir().path(), fqn, detail });
            }
        }
        Ok(renamed)
    }
}

/// The path of a key that was renamed: as deep as before, where that is possible.
fn moved(path: &[Segment], fqn: &str) -> Vec<Segment> {
    if let Some((_, above)) = path.split_last()
        && let Some(last) = fqn.strip_prefix(&format!("{}.", join(above)))
    {
        return above.iter().cloned().chain([last.into()]).collect();
    }
    vec![fqn.into()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(fqn: &str, expected: &str) {
        assert_eq!(canonical(fqn), expected);
        assert_eq!(canonical(expected), expected);
    }

    #[test]
    fn names_of_all_versions_become_one() {
        check("tok_embeddings.weight", "tok_embeddings.weight");
        check("model.tok_embeddings.weight", "tok_embeddings.weight");
        check("model.layers.11.attention.wk.weight", "layers.11.attention.wk.weight");
        check("lm_head.weight", "output.weight");
        check("layers.0.attention.qkv_linear.wv.weight", "layers.0.attention.wv.weight");
        check("layers.0.attention.wo.weight", "layers.0.attention.wo.weight");
        check(
            "optimizer.state.layers.2.attention.qkv_linear.wq.weight.exp_avg",
            "optimizer.state.layers.2.attention.wq.weight.exp_avg",
        );
        check(
            "optimizer.param_groups.lm_head.weight.lr",
            "optimizer.param_groups.output.weight.lr",
        );
        // Hugging Face's own names are not torchtitan's.
        check("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight");
        check("model.embed_tokens.weight", "model.embed_tokens.weight");
        check("train_state.step", "train_state.step");
    }

    #[test]
    fn a_renamed_key_keeps_its_depth() {
        let path = ["optimizer".into(), "state.lm_head.weight.step".into()];
        let fqn = "optimizer.state.output.weight.step";
        assert_eq!(moved(&path, fqn), ["optimizer".into(), "state.output.weight.step".into()]);
        let path = ["model".into(), "norm.weight".into()];
        assert_eq!(moved(&path, "norm.weight"), ["norm.weight".into()]);
    }
}
