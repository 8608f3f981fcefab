//! Random checkpoints that we write, and everything that we convert, read by
//! PyTorch with equal bytes (CKPT-2).

use std::path::Path;
use std::process::Command;

use dcp::convert::{TorchFile, cast, llama, to_dcp, to_safetensors_folder, to_torch};
use dcp::writer::{Content, Item, save};
use dcp::{Checkpoint, Dir, Dtype, Region, Segment, ShardWriter, Value, write_index};
use serde_json::{Map, Value as Json, json};

use crate::support::{Tensor, cut, sha256};

/// Random checkpoints.
const CASES: u64 = 240;

/// Runs the referee; its output.
#[track_caller]
fn referee(arguments: &[&Path]) -> String {
    let python =
        std::env::var_os("ELASTIC_TEST_PYTHON").expect("run `make venv`, then `make test`");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pytorch/referee.py");
    let output = Command::new(python)
        .arg(script)
        .args(arguments)
        .env_remove("LD_LIBRARY_PATH")
        .env("OMP_NUM_THREADS", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{complained}");
    print!("{said}");
    said
}

fn expected(tensor: &Tensor) -> Json {
    json!({
        "dtype": tensor.dtype.torch_name(),
        "shape": tensor.shape,
        "sha256": sha256(&tensor.bytes),
    })
}

/// Reproducible choices.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % limit
    }
}

/// A tensor of any type that PyTorch can copy, of up to four dimensions.
fn tensor(random: &mut Random, n: u64) -> Tensor {
    let dtypes: Vec<Dtype> = Dtype::all().filter(|&d| d != Dtype::F4E2M1FnX2).collect();
    let dtype = dtypes[random.below(dtypes.len() as u64) as usize];
    let dims = random.below(5);
    let shape: Vec<u64> = (0..dims).map(|_| random.below(8)).collect();
    let mut tensor = Tensor::new(&format!("t.{n}"), dtype, &shape);
    if dtype == Dtype::Bool {
        tensor.bytes.iter_mut().for_each(|byte| *byte &= 1);
    }
    tensor
}

/// Saves tensors from a random mesh: each cut along one or two dimensions.
fn save_random(random: &mut Random, folder: &Path) {
    let tensors: Vec<Tensor> = (0..1 + random.below(4)).map(|n| tensor(random, n)).collect();
    let mesh = [1 + random.below(4), 1 + random.below(3)];
    let cuts: Vec<[u64; 2]> = tensors.iter().map(|_| [random.below(4), random.below(4)]).collect();
    let mut shards = Vec::new();
    for rank in 0..mesh[0] * mesh[1] {
        let mut writer = ShardWriter::create(folder, rank as u32).unwrap();
        for (tensor, cuts) in tensors.iter().zip(&cuts) {
            let dims = tensor.shape.len();
            let mut region = Region::whole(&tensor.shape);
            let place = [rank / mesh[1], rank % mesh[1]];
            let mut own = true;
            for axis in 0..2 {
                let dim = cuts[axis] as usize;
                if dim >= dims || axis == 1 && dim == cuts[0] as usize {
                    // Replicated along this axis: its first rank writes.
                    own &= place[axis] == 0;
                    continue;
                }
                let part = cut(&tensor.shape, dim, place[axis], mesh[axis]);
                region.offsets[dim] = part.offsets[dim];
                region.sizes[dim] = part.sizes[dim];
            }
            if own {
                let bytes = tensor.region(&region);
                let Tensor { fqn, dtype, shape, .. } = tensor;
                writer.tensor(fqn, &[fqn.as_str().into()], *dtype, shape, &region, &bytes).unwrap();
            }
        }
        shards.push(writer.finish().unwrap());
    }
    dcp::write_metadata(folder, &shards).unwrap();
    let all: Map<_, _> = tensors.iter().map(|t| (t.fqn.clone(), expected(t))).collect();
    std::fs::write(folder.join("expected.json"), Json::Object(all).to_string()).unwrap();
}

#[test]
fn pytorch_loads_random_checkpoints_in_one_to_four_processes() {
    let scratch = tempfile::tempdir().unwrap();
    let mut random = Random(0x5eed);
    for n in 0..CASES {
        save_random(&mut random, &scratch.path().join(format!("{n:04}")));
    }
    for world in ["1", "2", "3", "4"] {
        let said = referee(&[Path::new("cases"), scratch.path(), Path::new(world)]);
        assert!(said.contains(&format!("{CASES} cases in {world} processes")), "{said}");
    }
}

/// A checkpoint of `Vec<Tensor>` with two threads and an object.
fn save_all(folder: &Path, tensors: &[Tensor]) {
    let path = |fqn: &str| -> Vec<Segment> {
        match fqn.split_once('.') {
            Some((top @ ("optimizer" | "train_state"), rest)) => vec![top.into(), rest.into()],
            _ => vec![fqn.into()],
        }
    };
    let paths: Vec<_> = tensors.iter().map(|tensor| path(&tensor.fqn)).collect();
    let mut items: Vec<_> = tensors
        .iter()
        .zip(&paths)
        .map(|(tensor, path)| Item {
            fqn: &tensor.fqn,
            path,
            content: Content::Tensor {
                dtype: tensor.dtype,
                shape: &tensor.shape,
                region: Region::whole(&tensor.shape),
                bytes: &tensor.bytes,
            },
        })
        .collect();
    let (step, step_path) = (Value::Int(17), path("train_state.step"));
    let content = Content::Object(&step);
    items.push(Item { fqn: "train_state.step", path: &step_path, content });
    let dir = Dir::at(folder).unwrap();
    write_index(&dir, &save(&dir, 0, &items, 2).unwrap()).unwrap();
}

#[test]
fn one_file_goes_to_pytorch_and_comes_back() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    // One is large enough to lie in both files of the save.
    let tensors = [
        Tensor::new("tok_embeddings.weight", Dtype::BF16, &[4096, 300]),
        Tensor::new("norm.weight", Dtype::F32, &[]),
        Tensor::new("none", Dtype::I64, &[0, 3]),
        Tensor::new("optimizer.state.norm.weight.exp_avg", Dtype::U16, &[3, 2]),
    ];
    save_all(&at("dcp"), &tensors);
    let source = Checkpoint::open(&at("dcp")).unwrap();
    assert!(source.verify().unwrap().digests);
    to_torch(&source, &at("all.pt"), &mut |_, _| ()).unwrap();
    let all: Map<_, _> = tensors.iter().map(|t| (t.fqn.clone(), expected(t))).collect();
    std::fs::write(at("all.json"), Json::Object(all).to_string()).unwrap();
    let said = referee(&[Path::new("torch"), &at("all.pt"), &at("all.json")]);
    assert!(said.contains("4 tensors, step 17"), "{said}");

    referee(&[Path::new("save"), &at("theirs.pt"), &at("theirs.json")]);
    let theirs = TorchFile::open(&at("theirs.pt")).unwrap();
    std::fs::create_dir(at("cases")).unwrap();
    let report = to_dcp(&theirs, &at("cases/0"), 3, &mut |_, _| ()).unwrap();
    assert_eq!((report.objects, report.skipped.len()), (2, 0));
    std::fs::copy(at("theirs.json"), at("cases/0/expected.json")).unwrap();
    let said = referee(&[Path::new("cases"), &at("cases"), Path::new("2")]);
    assert!(said.contains("1 cases in 2 processes"), "{said}");
}

#[test]
fn llama_goes_to_hugging_face_and_comes_back() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let (heads, kv, hd, d) = (4, 2, 6, 10);
    let weight = |fqn: &str, shape: &[u64]| Tensor::new(fqn, Dtype::F32, shape);
    let tensors = [
        weight("tok_embeddings.weight", &[30, d]),
        weight("layers.0.attention.wq.weight", &[heads * hd, d]),
        weight("layers.0.attention.wk.weight", &[kv * hd, d]),
        weight("layers.0.attention.wv.weight", &[kv * hd, d]),
        weight("layers.0.attention.wo.weight", &[d, heads * hd]),
        weight("layers.0.feed_forward.w1.weight", &[16, d]),
        weight("layers.0.attention_norm.weight", &[d]),
        weight("norm.weight", &[d]),
        weight("output.weight", &[30, d]),
        weight("optimizer.state.norm.weight.exp_avg", &[d]),
    ];
    save_all(&at("dcp"), &tensors);
    let source = Checkpoint::open(&at("dcp")).unwrap();
    let hf = llama::to_hf(&source, heads).unwrap();
    // Several files.
    to_safetensors_folder(&hf, &at("hf"), 1500, &[], &mut |_, _| ()).unwrap();

    // The permutation, said another way: (heads, hd/2, 2, D) to (heads, 2, hd/2, D).
    let permuted = |tensor: &Tensor, heads: u64| {
        let row = (d * 4) as usize;
        let mut bytes = Vec::new();
        for h in 0..heads {
            for p in 0..2 {
                for i in 0..hd / 2 {
                    let from = (h * hd + 2 * i + p) as usize;
                    bytes.extend(&tensor.bytes[from * row..][..row]);
                }
            }
        }
        Tensor { bytes, ..tensor.clone() }
    };
    let layer = "model.layers.0";
    let expect = [
        ("model.embed_tokens.weight".to_owned(), tensors[0].clone()),
        (format!("{layer}.self_attn.q_proj.weight"), permuted(&tensors[1], heads)),
        (format!("{layer}.self_attn.k_proj.weight"), permuted(&tensors[2], kv)),
        (format!("{layer}.self_attn.v_proj.weight"), tensors[3].clone()),
        (format!("{layer}.self_attn.o_proj.weight"), tensors[4].clone()),
        (format!("{layer}.mlp.gate_proj.weight"), tensors[5].clone()),
        (format!("{layer}.input_layernorm.weight"), tensors[6].clone()),
        ("model.norm.weight".to_owned(), tensors[7].clone()),
        ("lm_head.weight".to_owned(), tensors[8].clone()),
    ];
    let all: Map<_, _> = expect.iter().map(|(fqn, t)| (fqn.clone(), expected(t))).collect();
    std::fs::write(at("hf.json"), Json::Object(all).to_string()).unwrap();
    let said = referee(&[Path::new("hf"), &at("hf"), &at("hf.json")]);
    assert!(said.contains("9 tensors of a Hugging Face model"), "{said}");

    let hf = Checkpoint::open(&at("hf")).unwrap();
    let back = llama::from_hf(&hf, heads).unwrap();
    to_dcp(&back, &at("back"), 3, &mut |_, _| ()).unwrap();
    let back = Checkpoint::open(&at("back")).unwrap();
    for tensor in &tensors[..9] {
        let whole = Region::whole(&tensor.shape);
        assert_eq!(back.read_vec(&tensor.fqn, &whole).unwrap(), tensor.bytes, "{}", tensor.fqn);
    }
    // In another type: rounded as PyTorch rounds.
    let half = cast(&hf, Some(Dtype::BF16));
    to_safetensors_folder(&half, &at("half"), u64::MAX, &[], &mut |_, _| ()).unwrap();
    let half = Checkpoint::open(&at("half")).unwrap();
    assert_eq!(half.tensor("lm_head.weight").unwrap().dtype, Dtype::BF16);
    assert!(llama::to_hf(&source, 5).is_err_and(|e| e.to_string().contains("5 heads")));
}
