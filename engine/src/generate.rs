//! Text from the model, byte by byte.

use tch::{Kind, Tensor};

use crate::{Engine, Error, random::Stream};

impl Engine {
    /// Logits after each of at most `training.seq_len` tokens,
    /// `[tokens, vocab_size]` in C order. The weights must be gathered.
    ///
    /// # Errors
    /// [`Error::Fresh`], or [`Error::Model`] for tokens that the model cannot take.
    pub fn logits(&self, ids: &[i64]) -> Result<Vec<f32>, Error> {
        self.progress().ok_or(Error::Fresh)?;
        let logits = self.state.replica().model().logits(ids)?;
        let flat = logits.f_to_kind(Kind::Float).and_then(|logits| logits.f_flatten(0, -1));
        Ok(flat.and_then(Vec::try_from).map_err(crate::model::Error::from)?)
    }

    /// `count` tokens after `prompt`, whose bytes are token ids; an empty prompt
    /// starts from a newline. The model sees the last `training.seq_len` tokens.
    /// At `temperature` 0 each is the likeliest one, above it is drawn, and the
    /// same seed draws the same text. The weights must be gathered.
    ///
    /// # Errors
    /// [`Error::Fresh`], [`Error::NotBytes`] for a model of other tokens.
    pub fn generate(
        &self,
        prompt: &[u8],
        count: usize,
        temperature: f64,
        seed: u64,
    ) -> Result<Vec<u8>, Error> {
        self.progress().ok_or(Error::Fresh)?;
        let vocab_size = self.config.model.vocab_size;
        if vocab_size != 256 {
            return Err(Error::NotBytes { vocab_size });
        }
        let model = self.state.replica().model();
        let draws = Stream::generate(seed);
        let prompt = if prompt.is_empty() { b"\n" } else { prompt };
        let mut ids: Vec<i64> = prompt.iter().map(|&byte| i64::from(byte)).collect();
        for draw in 0..count as u64 {
            let seen = &ids[ids.len().saturating_sub(model.context())..];
            let last = model.logits(seen)?.f_get(-1).map_err(crate::model::Error::from)?;
            ids.push(choose(&last, temperature, draws.uniform(draw))?);
        }
        // PANIC: ids are below the vocabulary of 256.
        Ok(ids[prompt.len()..].iter().map(|&id| u8::try_from(id).expect("a byte")).collect())
    }
}

/// A token of the distribution softmax(logits / temperature), at the quantile
/// `draw` of it.
fn choose(logits: &Tensor, temperature: f64, draw: f64) -> Result<i64, crate::model::Error> {
    let logits = logits.f_to_kind(Kind::Double)?;
    if temperature <= 0.0 {
        return Ok(logits.f_argmax(0, false)?.f_int64_value(&[])?);
    }
    let scaled = logits.f_div_scalar(temperature)?.f_softmax(0, Kind::Double)?;
    let probabilities = Vec::<f64>::try_from(scaled)?;
    let mut left = draw;
    let past = |p: &f64| {
        left -= p;
        left < 0.0
    };
    let last = probabilities.len() - 1;
    Ok(probabilities.iter().position(past).unwrap_or(last) as i64)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[track_caller]
    fn check(temperature: f64, draw: f64, expected: i64) {
        let logits = Tensor::from_slice(&[0.0f32, (2.0f32).ln(), (5.0f32).ln()]);
        assert_eq!(choose(&logits, temperature, draw).unwrap(), expected);
    }

    #[test]
    fn a_draw_picks_by_probability_and_temperature() {
        check(1.0, 0.1, 0);
        check(1.0, 0.2, 1);
        check(1.0, 0.9, 2);
        check(1.0, 1.0, 2);
        check(0.01, 0.1, 2);
        check(0.0, 0.0, 2);
    }
}
