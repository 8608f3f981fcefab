//! Model shapes by name and flavor, as torchtitan's `llama3` registry has them:
//! what can be said about a model without computing with it.

use serde::{Deserialize, Serialize};

/// A named parameter: what a model declares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declaration {
    /// Unique name, torchtitan's for its models.
    pub name: String,
    /// Sizes of the dimensions; empty for a scalar.
    pub shape: Vec<usize>,
    /// Whether weight decay applies.
    pub decay: bool,
}

/// The shape of a Llama decoder. Field names are torchtitan's model arguments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Width of the residual stream.
    pub dim: usize,
    /// Number of decoder blocks.
    pub n_layers: usize,
    /// Query heads; divides `dim` into heads of even width.
    pub n_heads: usize,
    /// Key and value heads (grouped-query attention); divides `n_heads`.
    pub n_kv_heads: usize,
    /// Number of token ids.
    pub vocab_size: usize,
    /// The feed-forward width is rounded up to a multiple of this.
    pub multiple_of: usize,
    /// Factor on the feed-forward width before rounding.
    pub ffn_dim_multiplier: Option<f64>,
    /// Added to the mean square in RMSNorm.
    pub norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Llama 3.1's stretching of the rotary frequencies, if any.
    pub rope_scaling: Option<RopeScaling>,
}

/// Llama 3.1's rotary scaling: long wavelengths are stretched by `factor`,
/// short ones kept, those between interpolated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeScaling {
    /// How far long wavelengths are stretched.
    pub factor: f64,
    /// Wavelengths above `original_context / low_freq_factor` are stretched fully.
    pub low_freq_factor: f64,
    /// Wavelengths below `original_context / high_freq_factor` are kept.
    pub high_freq_factor: f64,
    /// Context length, in tokens, that the unscaled frequencies were made for.
    pub original_context: usize,
}

/// A shape that no model can have.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// The registry has no such entry.
    #[error("unknown model {name:?} flavor {flavor:?}: llama3 has the flavors {}", FLAVORS.join(", "))]
    Unknown {
        /// `model.name` of the configuration.
        name: String,
        /// `model.flavor` of the configuration.
        flavor: String,
    },
    /// A field breaks the rule of its documentation.
    #[error("model.{field} = {value}: {rule}")]
    Invalid {
        /// Field of [`Shape`].
        field: &'static str,
        /// What it holds.
        value: String,
        /// What it must be.
        rule: String,
    },
}

/// The flavors of `llama3`.
pub const FLAVORS: [&str; 5] = ["debugmodel", "8B", "70B", "405B", "byte-1M"];

/// The shape of a named model.
///
/// # Errors
/// [`Error::Unknown`] for a pair outside the registry.
pub fn find(name: &str, flavor: &str) -> Result<Shape, Error> {
    let unknown = || Error::Unknown { name: name.to_owned(), flavor: flavor.to_owned() };
    if name != "llama3" {
        return Err(unknown());
    }
    let llama = |dim, n_layers, n_heads, n_kv_heads, vocab_size| Shape {
        dim,
        n_layers,
        n_heads,
        n_kv_heads,
        vocab_size,
        multiple_of: 256,
        ffn_dim_multiplier: None,
        norm_eps: 1e-5,
        rope_theta: 500_000.0,
        rope_scaling: Some(LLAMA_3_1),
    };
    let large = |shape, multiple_of, factor| Shape {
        multiple_of,
        ffn_dim_multiplier: Some(factor),
        ..shape
    };
    Ok(match flavor {
        "debugmodel" => llama(256, 6, 16, 16, 2048),
        "8B" => large(llama(4096, 32, 32, 8, 128_256), 1024, 1.3),
        "70B" => large(llama(8192, 80, 64, 8, 128_256), 4096, 1.3),
        "405B" => large(llama(16384, 126, 128, 8, 128_256), 4096, 1.2),
        "byte-1M" => Shape { rope_scaling: None, ..llama(128, 4, 8, 4, 256) },
        _ => return Err(unknown()),
    })
}

const LLAMA_3_1: RopeScaling = RopeScaling {
    factor: 8.0,
    low_freq_factor: 1.0,
    high_freq_factor: 4.0,
    original_context: 8192,
};

impl Shape {
    /// Width of one attention head.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.dim / self.n_heads
    }

    /// Width of the feed-forward hidden layer, by torchtitan's rule:
    /// `8·dim/3`, times the multiplier, rounded up to `multiple_of`.
    #[must_use]
    pub fn hidden_dim(&self) -> usize {
        let hidden = 8 * self.dim / 3;
        let hidden = match self.ffn_dim_multiplier {
            Some(factor) => (factor * hidden as f64) as usize,
            None => hidden,
        };
        hidden.div_ceil(self.multiple_of) * self.multiple_of
    }

    /// Every parameter, in torchtitan's registration order. All decay, norms
    /// and embedding included, as torchtitan has it.
    #[must_use]
    pub fn parameters(&self) -> Vec<Declaration> {
        let (dim, hidden) = (self.dim, self.hidden_dim());
        let kv = self.n_kv_heads * self.head_dim();
        let decay = true;
        let declared =
            |name: String, shape: &[usize]| Declaration { name, shape: shape.to_vec(), decay };
        let mut all = vec![declared("tok_embeddings.weight".into(), &[self.vocab_size, dim])];
        for layer in 0..self.n_layers {
            let block: [(&str, &[usize]); 9] = [
                ("attention.wq", &[dim, dim]),
                ("attention.wk", &[kv, dim]),
                ("attention.wv", &[kv, dim]),
                ("attention.wo", &[dim, dim]),
                ("feed_forward.w1", &[hidden, dim]),
                ("feed_forward.w2", &[dim, hidden]),
                ("feed_forward.w3", &[hidden, dim]),
                ("attention_norm", &[dim]),
                ("ffn_norm", &[dim]),
            ];
            all.extend(
                block
                    .iter()
                    .map(|(part, shape)| declared(format!("layers.{layer}.{part}.weight"), shape)),
            );
        }
        all.push(declared("norm.weight".into(), &[dim]));
        all.push(declared("output.weight".into(), &[self.vocab_size, dim]));
        all
    }

    /// Number of parameters.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.parameters().iter().map(|p| p.shape.iter().product::<usize>()).sum()
    }

    /// Floating-point operations of forward and backward, per token of a
    /// sequence of `seq_len`, by torchtitan's formula (full, not causal, attention).
    #[must_use]
    pub fn flops_per_token(&self, seq_len: usize) -> f64 {
        let dense = self.elements() - self.vocab_size * self.dim;
        6.0 * dense as f64
            + 6.0 * (self.n_layers * self.n_heads) as f64 * (2 * self.head_dim() * seq_len) as f64
    }

    /// Checks the rules that the fields document.
    ///
    /// # Errors
    /// [`Error::Invalid`] for the first field that breaks its rule.
    pub fn validate(&self) -> Result<(), Error> {
        let check = |good: bool, field, value: String, rule: &str| {
            if good { Ok(()) } else { Err(Error::Invalid { field, value, rule: rule.to_owned() }) }
        };
        let positive = [
            ("dim", self.dim),
            ("n_layers", self.n_layers),
            ("n_heads", self.n_heads),
            ("n_kv_heads", self.n_kv_heads),
            ("vocab_size", self.vocab_size),
            ("multiple_of", self.multiple_of),
        ];
        for (field, value) in positive {
            check(value > 0, field, value.to_string(), "must be positive")?;
        }
        let heads = self.n_heads;
        check(
            self.dim.is_multiple_of(heads) && self.head_dim().is_multiple_of(2),
            "dim",
            self.dim.to_string(),
            &format!("must split into {heads} heads of an even width"),
        )?;
        check(
            heads.is_multiple_of(self.n_kv_heads),
            "n_kv_heads",
            self.n_kv_heads.to_string(),
            &format!("must divide n_heads = {heads}"),
        )?;
        let factor = self.ffn_dim_multiplier.unwrap_or(1.0);
        let finite = |x: f64| x.is_finite() && x > 0.0;
        check(finite(factor), "ffn_dim_multiplier", factor.to_string(), "must be positive")?;
        check(finite(self.norm_eps), "norm_eps", self.norm_eps.to_string(), "must be positive")?;
        check(self.rope_theta > 1.0, "rope_theta", self.rope_theta.to_string(), "must exceed 1")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[track_caller]
    fn check(flavor: &str, hidden: usize, elements: usize, flops: (usize, f64)) {
        let shape = find("llama3", flavor).unwrap();
        assert_eq!(shape.validate(), Ok(()));
        assert_eq!(shape.hidden_dim(), hidden);
        assert_eq!(shape.elements(), elements);
        let (seq_len, expected) = flops;
        let relative = shape.flops_per_token(seq_len) / expected - 1.0;
        assert!(relative.abs() < 1e-4, "{flavor}: {}", shape.flops_per_token(seq_len));
    }

    #[test]
    fn flavors_have_torchtitans_sizes() {
        check("debugmodel", 768, 6_163_712, (2048, 71_585_280.0));
        check("8B", 14336, 8_030_261_248, (8192, 57.914e9));
        check("70B", 28672, 70_553_706_496, (8192, 481.44e9));
        check("405B", 53248, 405_853_388_800, (8192, 2625.4e9));
        check("byte-1M", 512, 1_049_728, (128, 6_888_192.0));
    }

    #[test]
    fn an_unknown_flavor_lists_the_known_ones() {
        let text = find("llama3", "7B").unwrap_err().to_string();
        assert!(text.contains("\"7B\"") && text.contains("byte-1M"), "{text}");
    }

    #[test]
    fn a_broken_shape_names_the_field() {
        let good = find("llama3", "byte-1M").unwrap();
        let heads = Shape { n_heads: 7, ..good.clone() }.validate().unwrap_err().to_string();
        assert_eq!(heads, "model.dim = 128: must split into 7 heads of an even width");
        let groups = Shape { n_kv_heads: 3, ..good }.validate().unwrap_err().to_string();
        assert_eq!(groups, "model.n_kv_heads = 3: must divide n_heads = 8");
    }
}
