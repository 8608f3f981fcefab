//! Hugging Face's names for Llama 3 and torchtitan's, in both directions.
//!
//! The two rotate queries and keys over different pairs of rows: torchtitan
//! over neighbours, Hugging Face over the two halves of a head. Row `2 i + p` of
//! a head there is row `p hd/2 + i` here, for `hd` rows in a head.

use crate::region::Region;

use super::{Error, Source, Tensor};

/// A source under other names.
pub struct Renamed<'a> {
    source: &'a dyn Source,
    /// In order of the new names, which are all different.
    tensors: Vec<Found>,
    direction: Direction,
}

struct Found {
    tensor: Tensor,
    own: Tensor,
    /// Rows of a head, where rows are permuted.
    head: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    ToHf,
    FromHf,
}

/// The model of a torchtitan or elastic checkpoint under Hugging Face's names;
/// everything else in it, such as the optimizer's state, is left out. `heads` is
/// the number of query heads.
///
/// # Errors
/// [`Error::Missing`] without a model, [`Error::Name`] for a layer's tensor of
/// another architecture or a shape that `heads` does not divide.
pub fn to_hf(source: &dyn Source, heads: u64) -> Result<Renamed<'_>, Error> {
    let all = source.tensors();
    let model = |fqn: &str| fqn.strip_prefix("model.").unwrap_or(fqn).to_owned();
    let query = all.iter().find(|tensor| is_query(&model(&tensor.fqn)));
    let head = head_rows(query, "layers.0.attention.wq.weight", heads)?;
    let mut tensors = Vec::new();
    for own in all {
        let fqn = model(&own.fqn);
        if ["optimizer.", "optim.", "lr_scheduler.", "dataloader.", "train_state."]
            .iter()
            .any(|prefix| fqn.starts_with(prefix))
        {
            continue;
        }
        let name = hf_name(&fqn).ok_or_else(|| foreign(&own.fqn))?;
        tensors.push(found(own, name, head)?);
    }
    Renamed::new(source, tensors, Direction::ToHf)
}

/// A Hugging Face model under torchtitan's names. A tied output projection is
/// written out, as torchtitan has it. `heads` is the number of query heads.
///
/// # Errors
/// As [`to_hf`].
pub fn from_hf(source: &dyn Source, heads: u64) -> Result<Renamed<'_>, Error> {
    let all = source.tensors();
    let query = all.iter().find(|tensor| tensor.fqn.ends_with(".self_attn.q_proj.weight"));
    let head = head_rows(query, "model.layers.0.self_attn.q_proj.weight", heads)?;
    let mut tensors = Vec::new();
    for own in all {
        if own.fqn.ends_with("rotary_emb.inv_freq") {
            continue;
        }
        let name = titan_name(&own.fqn).ok_or_else(|| foreign(&own.fqn))?;
        tensors.push(found(own, name, head)?);
    }
    let has = |name: &str| tensors.iter().find(|found| found.tensor.fqn == name);
    if has("output.weight").is_none() {
        let embedding = has("tok_embeddings.weight");
        let embedding = embedding.ok_or_else(|| Error::Missing("model.embed_tokens".to_owned()))?;
        let own = embedding.own.clone();
        tensors.push(found(own, "output.weight".to_owned(), head)?);
    }
    Renamed::new(source, tensors, Direction::FromHf)
}

impl<'a> Renamed<'a> {
    fn new(
        source: &'a dyn Source,
        mut tensors: Vec<Found>,
        direction: Direction,
    ) -> Result<Self, Error> {
        tensors.sort_by(|a, b| a.tensor.fqn.cmp(&b.tensor.fqn));
        let twice = tensors.windows(2).find(|pair| pair[0].tensor.fqn == pair[1].tensor.fqn);
        if let Some([one, other]) = twice {
            let detail = format!("becomes {}, as {} does", one.tensor.fqn, other.own.fqn);
            return Err(Error::Name { fqn: one.own.fqn.clone(), detail });
        }
        Ok(Self { source, tensors, direction })
    }
}

impl Source for Renamed<'_> {
    fn tensors(&self) -> Vec<Tensor> {
        self.tensors.iter().map(|found| found.tensor.clone()).collect()
    }

    fn read(&self, tensor: &Tensor, region: &Region, into: &mut [u8]) -> Result<(), Error> {
        let at = self.tensors.binary_search_by(|found| found.tensor.fqn.cmp(&tensor.fqn));
        let found = at.map_or(None, |at| self.tensors.get(at));
        let Found { own, head, .. } = found.ok_or_else(|| Error::Missing(tensor.fqn.clone()))?;
        let Some(head) = *head else { return self.source.read(own, region, into) };
        if region.is_empty() {
            return Ok(());
        }
        // The heads that the rows are of, whole; then the rows in their order.
        let (start, rows) = (region.offsets[0], region.sizes[0]);
        let first = start / head * head;
        let last = (start + rows).next_multiple_of(head);
        let mut heads = region.clone();
        (heads.offsets[0], heads.sizes[0]) = (first, last - first);
        let row = into.len() / rows as usize;
        let mut bytes = vec![0; row * (last - first) as usize];
        self.source.read(own, &heads, &mut bytes)?;
        for (n, into) in (start..).zip(into.chunks_exact_mut(row.max(1))) {
            let from =
                (n / head * head + permuted(self.direction, n % head, head) - first) as usize;
            into.copy_from_slice(&bytes[from * row..][..row]);
        }
        Ok(())
    }
}

/// The source's row for a row of a head.
fn permuted(direction: Direction, row: u64, head: u64) -> u64 {
    match direction {
        // Row p hd/2 + i is torchtitan's 2 i + p.
        Direction::ToHf => 2 * (row % (head / 2)) + row / (head / 2),
        Direction::FromHf => row % 2 * (head / 2) + row / 2,
    }
}

fn found(own: Tensor, name: String, head: u64) -> Result<Found, Error> {
    let permuted = is_query(&name)
        || name.ends_with(".wk.weight")
        || name.ends_with(".q_proj.weight")
        || name.ends_with(".k_proj.weight");
    let rows = own.shape.first().copied().unwrap_or_default();
    if permuted && (own.shape.len() != 2 || !rows.is_multiple_of(head)) {
        let detail = format!("of shape {:?} is not made of heads of {head} rows", own.shape);
        return Err(Error::Name { fqn: own.fqn, detail });
    }
    let path = vec![name.as_str().into()];
    let tensor = Tensor { fqn: name, path, dtype: own.dtype, shape: own.shape.clone() };
    Ok(Found { tensor, own, head: permuted.then_some(head) })
}

/// Rows of a head, from the query projection.
fn head_rows(query: Option<&Tensor>, example: &str, heads: u64) -> Result<u64, Error> {
    let query = query.ok_or_else(|| Error::Missing(example.to_owned()))?;
    let rows = query.shape.first().copied().unwrap_or_default();
    match rows.checked_div(heads) {
        Some(head) if head > 0 && head % 2 == 0 && head * heads == rows => Ok(head),
        _ => {
            let detail = format!("has {rows} rows, which {heads} heads of even size do not divide");
            Err(Error::Name { fqn: query.fqn.clone(), detail })
        }
    }
}

fn is_query(fqn: &str) -> bool {
    fqn.ends_with(".wq.weight")
}

fn foreign(fqn: &str) -> Error {
    let detail = "is no tensor of a Llama 3 model".to_owned();
    Error::Name { fqn: fqn.to_owned(), detail }
}

/// Outside of layers: Hugging Face's name, and torchtitan's.
const OUTER: [(&str, &str); 4] = [
    ("model.embed_tokens.weight", "tok_embeddings.weight"),
    ("model.norm.weight", "norm.weight"),
    ("lm_head.weight", "output.weight"),
    // torchtitan since 2026.
    ("lm_head.weight", "lm_head.weight"),
];

/// In a layer; the names of 2026 come second.
const INNER: [(&str, &str); 12] = [
    ("self_attn.q_proj.weight", "attention.wq.weight"),
    ("self_attn.k_proj.weight", "attention.wk.weight"),
    ("self_attn.v_proj.weight", "attention.wv.weight"),
    ("self_attn.o_proj.weight", "attention.wo.weight"),
    ("mlp.gate_proj.weight", "feed_forward.w1.weight"),
    ("mlp.up_proj.weight", "feed_forward.w3.weight"),
    ("mlp.down_proj.weight", "feed_forward.w2.weight"),
    ("input_layernorm.weight", "attention_norm.weight"),
    ("post_attention_layernorm.weight", "ffn_norm.weight"),
    ("self_attn.q_proj.weight", "attention.qkv_linear.wq.weight"),
    ("self_attn.k_proj.weight", "attention.qkv_linear.wk.weight"),
    ("self_attn.v_proj.weight", "attention.qkv_linear.wv.weight"),
];

fn hf_name(titan: &str) -> Option<String> {
    if let Some((hf, _)) = OUTER.iter().find(|names| names.1 == titan) {
        return Some((*hf).to_owned());
    }
    let (layer, inner) = titan.strip_prefix("layers.")?.split_once('.')?;
    let layer: u32 = layer.parse().ok()?;
    let (hf, _) = INNER.iter().find(|names| names.1 == inner)?;
    Some(format!("model.layers.{layer}.{hf}"))
}

fn titan_name(hf: &str) -> Option<String> {
    if let Some((_, titan)) = OUTER.iter().find(|names| names.0 == hf) {
        return Some((*titan).to_owned());
    }
    let (layer, inner) = hf.strip_prefix("model.layers.")?.split_once('.')?;
    let layer: u32 = layer.parse().ok()?;
    let (_, titan) = INNER.iter().find(|names| names.0 == inner)?;
    Some(format!("layers.{layer}.{titan}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_both_ways() {
        for (hf, titan) in OUTER.iter().take(3) {
            assert_eq!(hf_name(titan).as_deref(), Some(*hf));
            assert_eq!(titan_name(hf).as_deref(), Some(*titan));
        }
        for (n, (hf, titan)) in INNER.iter().enumerate() {
            let (hf, titan) = (format!("model.layers.7.{hf}"), format!("layers.7.{titan}"));
            assert_eq!(hf_name(&titan).as_deref(), Some(hf.as_str()));
            // Of two names, we write the older one, which both read.
            assert_eq!(titan_name(&hf).is_some_and(|name| name == titan), n < 9);
        }
        assert_eq!(hf_name("layers.0.moe.router.gate.weight"), None);
        assert_eq!(titan_name("model.layers.x.mlp.up_proj.weight"), None);
    }

    #[test]
    fn rows_of_a_head_move_and_return() {
        let to_hf: Vec<u64> = (0..8).map(|row| permuted(Direction::ToHf, row, 8)).collect();
        assert_eq!(to_hf, [0, 2, 4, 6, 1, 3, 5, 7]);
        for row in 0..8 {
            assert_eq!(to_hf[permuted(Direction::FromHf, row, 8) as usize], row);
        }
    }
}
