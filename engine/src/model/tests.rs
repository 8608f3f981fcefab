use super::*;
use crate::{ffi::prepare_libtorch, layout::Declaration};

/// Weights that depend on nothing but their position: enough to tell bits apart.
fn tensors(shape: &Shape, kind: Kind) -> Vec<Tensor> {
    prepare_libtorch();
    let value = |p: usize, i: usize| ((p * 7919 + i * 104_729) % 2003) as f32 / 2003.0 - 0.5;
    let make = |(p, declared): (usize, Declaration)| {
        let elements: usize = declared.shape.iter().product();
        let scale = if declared.shape.len() == 1 { 1.0 } else { 0.1 };
        let values: Vec<f32> = (0..elements).map(|i| scale * value(p, i)).collect();
        let size: Vec<i64> = declared.shape.iter().map(|&d| d as i64).collect();
        Tensor::from_slice(&values).view(size.as_slice()).to_kind(kind)
    };
    shape.parameters().into_iter().enumerate().map(make).collect()
}

fn small() -> Shape {
    Shape { dim: 32, n_layers: 3, multiple_of: 32, ..registry::find("llama3", "byte-1M").unwrap() }
}

fn batch() -> MicroBatch {
    let ids: Vec<i64> = (0..2 * 17).map(|i| (i * i * 31 + 7) % 256).collect();
    MicroBatch::new(&ids, 16, 256).unwrap()
}

fn run(model: &Model) -> (f64, Vec<Vec<f32>>) {
    let mut gradients = vec![Vec::new(); model.shape.parameters().len()];
    let mut take = |p: usize, g: &Tensor| {
        assert!(gradients[p].is_empty(), "parameter {p} twice");
        gradients[p] = Vec::<f32>::try_from(g.flatten(0, -1)).unwrap();
        Ok(())
    };
    let loss = model.forward_backward(&batch(), 32.0, &|| false, &mut take).unwrap();
    (loss, gradients)
}

fn model(compute: Kind, recompute: Recompute) -> Model {
    let shape = small();
    let tensors = tensors(&shape, Kind::Float);
    Model::new(&shape, tensors, 16, compute, recompute).unwrap()
}

#[test]
fn segments_and_recomputation_have_the_bits_of_one_graph() {
    // TRAJ-1
    let model = model(Kind::Float, Recompute::Never);
    let mut x = model.embedding.forward(&batch().inputs, Kind::Float).unwrap();
    for block in &model.blocks {
        x = block.forward(&x, &model.rope).unwrap();
    }
    let loss = model.head.loss(&x, &batch().targets, 32.0).unwrap();
    let mut weights = vec![model.embedding.weight()];
    weights.extend(model.blocks.iter().flat_map(Block::weights));
    weights.extend(model.head.weights());
    let whole: Vec<Vec<f32>> = Tensor::run_backward(&[&loss], &weights, false, false)
        .iter()
        .map(|g| Vec::<f32>::try_from(g.flatten(0, -1)).unwrap())
        .collect();

    assert_eq!(run(&model), (loss.double_value(&[]), whole.clone()));
    for recompute in [Recompute::Every(1), Recompute::Every(2)] {
        let other = self::model(Kind::Float, recompute);
        assert_eq!(run(&other), (loss.double_value(&[]), whole.clone()), "{recompute:?}");
    }
}

#[test]
fn half_precision_computes_with_f32_gradients() {
    let (exact, _) = run(&model(Kind::Float, Recompute::Never));
    let (half, gradients) = run(&model(Kind::BFloat16, Recompute::Never));
    assert!((half / exact - 1.0).abs() < 0.02, "{half} {exact}");
    assert!(half != exact && gradients.iter().all(|g| g.iter().all(|x| x.is_finite())));
}

#[test]
fn an_abort_stops_at_the_next_boundary() {
    let polls = std::cell::Cell::new(0);
    let abort = || {
        polls.set(polls.get() + 1);
        polls.get() == 5
    };
    let model = model(Kind::Float, Recompute::Never);
    let result = model.forward_backward(&batch(), 32.0, &abort, &mut |_, _| Ok(()));
    assert!(matches!(result, Err(Error::Aborted)), "{result:?}");
    assert_eq!(polls.get(), 5);
}

#[test]
fn logits_see_only_the_past() {
    let model = model(Kind::Float, Recompute::Never);
    let long: Vec<i64> = (0..16).map(|i| i * 5 % 256).collect();
    let whole = model.logits(&long).unwrap();
    let start = model.logits(&long[..9]).unwrap();
    let difference = (whole.narrow(0, 0, 9) - start).abs().max().double_value(&[]);
    assert!(difference < 1e-5, "{difference}");
}

#[test]
fn an_ignored_target_counts_neither_in_the_loss_nor_in_the_count() {
    let model = model(Kind::Float, Recompute::Never);
    let ids: Vec<i64> = (0..17).collect();
    let loss = |ids: &[i64]| {
        let batch = MicroBatch::new(ids, 16, 256).unwrap();
        (model.loss(&batch, 1.0, &|| false).unwrap(), batch.counted())
    };
    let (all, counted) = loss(&ids);
    let mut ignoring = ids.clone();
    ignoring[16] = IGNORED;
    let (fewer, fewer_counted) = loss(&ignoring);
    assert_eq!((counted, fewer_counted), (16, 15));
    assert!(fewer < all);
}

#[test]
fn bad_input_is_named() {
    let token = MicroBatch::new(&[1, 2, 256], 2, 256).unwrap_err().to_string();
    assert_eq!(token, "token id 256 is outside the vocabulary of 256");
    let model = model(Kind::Float, Recompute::Never);
    let long = model.logits(&[0; 17]).unwrap_err().to_string();
    assert_eq!(long, "a sequence of 17 tokens exceeds the context of 16");
    let mut few = tensors(&small(), Kind::Float);
    few.pop();
    let count = Model::new(&small(), few, 16, Kind::Float, Recompute::Never).unwrap_err();
    assert_eq!(count.to_string(), "the model declares 30 parameters, 29 tensors were given");
}
