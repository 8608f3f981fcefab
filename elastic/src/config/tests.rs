use std::path::Path;

use super::resolve::resolve;
use super::schema::KEYS;
use super::*;

const FILE: &str = "job.toml";

fn from(text: &str, arguments: &[&str]) -> Result<Resolved, ConfigError> {
    let arguments: Vec<_> = arguments.iter().map(ToString::to_string).collect();
    let file = source::parse(Path::new(FILE), text)?;
    resolve(&[file, source::arguments(&arguments)?])
}

/// Resolves and compares one key.
#[track_caller]
fn check(text: &str, arguments: &[&str], key: &str, expected: &str) {
    let resolved = from(text, arguments).unwrap_or_else(|error| panic!("{error}"));
    let key = Key::find(key).expect("a key of the schema");
    assert_eq!((key.get)(&resolved.config).to_string(), expected);
}

/// Resolves and compares the message.
#[track_caller]
fn refuse(text: &str, arguments: &[&str], expected: &str) {
    match from(text, arguments) {
        Ok(_) => panic!("accepted, expected: {expected}"),
        Err(error) => assert_eq!(error.to_string(), expected),
    }
}

#[test]
fn the_command_line_wins_over_the_file_over_the_default() {
    check("", &[], "training.steps", "10000");
    check("[training]\nsteps = 7", &[], "training.steps", "7");
    check("[training]\nsteps = 7", &["--training.steps", "9"], "training.steps", "9");
    check("training.steps = 0x1F", &[], "training.steps", "31");
}

#[test]
fn arguments_are_written_in_many_ways() {
    check("", &["--training.steps=1_000"], "training.steps", "1000");
    check("", &["--lr-scheduler.warmup-steps", "3"], "lr_scheduler.warmup_steps", "3");
    check("", &["--training.global-batch-size", "-1"], "training.global_batch_size", "-1");
    check("", &["--validation.enable"], "validation.enable", "true");
    check("", &["--validation.enable", "--training.steps", "2"], "validation.enable", "true");
    check("", &["--checkpoint.enable", "False"], "checkpoint.enable", "false");
    check("", &["--checkpoint.enable=false"], "checkpoint.enable", "false");
    check("", &["--checkpoint.no_enable"], "checkpoint.enable", "false");
    check("", &["--checkpoint.no-enable=false"], "checkpoint.enable", "true");
    check("", &["--optimizer.lr", "3e-3"], "optimizer.lr", "0.003");
    check("", &["--optimizer.lr=1"], "optimizer.lr", "1.0");
    check("", &["--elastic.worker_bin=none"], "elastic.worker_bin", "unset");
    check("", &["--job.description=a, b=c"], "job.description", "\"a, b=c\"");
    check("", &["--parallelism.sharding", "NO_SHARD"], "parallelism.sharding", "\"none\"");
    check("", &["--parallelism.sharding", "ZERO1"], "parallelism.sharding", "\"zero1\"");
    let n = "activation_checkpoint.selective_ac_option";
    check("[activation_checkpoint]\nselective_ac_option = '3'", &[], n, "3");
    check("", &["--debug.seed", "5"], "training.seed", "5");
}

#[test]
fn every_problem_names_place_key_value_and_remedy() {
    refuse(
        "[training]\n\nsteps = 0",
        &[],
        "job.toml:3: training.steps = 0: must be an integer, ≥ 1",
    );
    refuse(
        "[training]\nsteps = \"many\"",
        &[],
        "job.toml:2: training.steps = \"many\": must be an integer, ≥ 1",
    );
    refuse(
        "",
        &["--training.steps", "1.5"],
        "command line (--training.steps): training.steps = \"1.5\": must be an integer, ≥ 1",
    );
    refuse("[optimizer]\nlr = nan", &[], "job.toml:2: optimizer.lr = NaN: must be a number, ≥ 0");
    refuse(
        "[lr_scheduler]\ndecay_type = \"cubic\"",
        &[],
        "job.toml:2: lr_scheduler.decay_type = \"cubic\": must be linear or sqrt or cosine",
    );
    refuse(
        "[elastic]\ntensor_transport = \"rdma\"",
        &[],
        "job.toml:2: elastic.tensor_transport = \"rdma\": must be auto or tcp",
    );
    refuse(
        "[elastic]\nworker_bin = 3",
        &[],
        "job.toml:2: elastic.worker_bin = 3: must be text that is not empty, or unset",
    );
    refuse(
        "[trainning]\nsteps = 3",
        &[],
        "job.toml:2: there is no key trainning.steps: did you mean training.steps?",
    );
    refuse(
        "[model]\nlr = 3",
        &[],
        "job.toml:2: there is no key model.lr: did you mean optimizer.lr?",
    );
    refuse(
        "[metrics]\nsomething_else_altogether = 3",
        &[],
        "job.toml:2: there is no key metrics.something_else_altogether: metrics has log_freq, \
         prometheus_listen",
    );
    refuse(
        "[parallelism]\ntensor_parallel_degree = 4",
        &[],
        "job.toml:2: parallelism.tensor_parallel_degree = 4: only 1 is supported by this version",
    );
    refuse(
        "",
        &["--compile.enable"],
        "command line (--compile.enable): compile.enable = true: only false is supported by this \
         version",
    );
    refuse(
        "[training]\nseed = 1\n[debug]\nseed = 2",
        &[],
        "job.toml:4: debug.seed is already set by job.toml:2: keep one of them",
    );
    refuse("[training\n", &[], "job.toml:1: unclosed table, expected `]`");
    refuse("", &["--training.steps"], "--training.steps: needs a value: write --section.key VALUE");
    refuse(
        "",
        &["training.steps=3"],
        "training.steps=3: write --section.key VALUE or --section.key=VALUE",
    );
}

#[test]
fn all_problems_are_reported_at_once() {
    refuse(
        "[training]\nsteps = 0\nseq_len = 0",
        &["--optimizer.beta1=1"],
        "job.toml:2: training.steps = 0: must be an integer, ≥ 1\n\
         job.toml:3: training.seq_len = 0: must be an integer, 1 to 16777216\n\
         command line (--optimizer.beta1=1): optimizer.beta1 = 1.0: must be a number, ≥ 0 and < 1",
    );
}

#[test]
fn keys_have_to_fit_together() {
    refuse(
        "[elastic]\nmin_nodes = 3\nmax_nodes = 2",
        &[],
        "elastic.min_nodes = 3 is more than elastic.max_nodes = 2",
    );
    refuse(
        "[training]\nlocal_batch_size = 8\nglobal_batch_size = 20",
        &[],
        "training.global_batch_size = 20 is not a multiple of training.local_batch_size = 8: the \
         nearest is 24",
    );
    refuse(
        "[checkpoint]\nfolder = \"s3://bucket/run\"",
        &[],
        "checkpoint.folder = \"s3://bucket/run\" is a URL: a running job saves into a folder that \
         all nodes see (a path); copy its checkpoints to an object store from there",
    );
    refuse(
        "[lr_scheduler]\ntotal_steps = 5",
        &[],
        "lr_scheduler.total_steps = 5 ends before training.steps = 10000: raise it, or leave it \
         unset",
    );
    refuse(
        "[elastic]\nstep_timeout_s = 1",
        &[],
        "elastic.failure_budget_ms = 1200 with elastic.step_timeout_s = 1: seal ≤ step does not \
         hold (2.4s against 1s): raise the step limit to at least twice the failure budget",
    );
}

#[test]
fn a_torchtitan_file_is_taken_as_far_as_it_asks_for_nothing_else() {
    let resolved = from(
        "[parallelism]\ndata_parallel_replicate_degree = 1\ndata_parallel_shard_degree = -1\n\
         pipeline_parallel_degree = 1\nmodule_fqns_per_model_part = []\n\
         [activation_checkpoint]\nmode = \"none\"\n\
         [training.dataloader]\nnum_workers = 2\n[compile]\n[experimental]\ncustom_import = \"\"\n",
        &[],
    )
    .expect("neutral");
    assert_eq!(
        resolved.notes,
        ["job.toml:9: training.dataloader.num_workers has no effect: token files are \
          memory-mapped, no loader process reads them"]
    );
}

/// The shape of torchtitan's own debug configuration.
#[test]
fn a_torchtitan_file_trains_on_a_token_file() {
    let text = r#"
[job]
dump_folder = "./outputs"
description = "Llama 3 debug training"
[profiling]
enable_profiling = false
save_traces_folder = "profile_trace"
profile_freq = 10
[metrics]
log_freq = 1
enable_tensorboard = false
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "./tests/assets/tokenizer"
[optimizer]
name = "AdamW"
lr = 8e-4
[lr_scheduler]
warmup_steps = 2
decay_ratio = 0.8
decay_type = "linear"
[training]
local_batch_size = 8
seq_len = 2048
steps = 10
dataset = "c4_test"
[parallelism]
fsdp_reshard_after_forward = "default"
tensor_parallel_degree = 1
[checkpoint]
enable = false
last_save_model_only = false
export_dtype = "float32"
async_mode = "disabled"
[activation_checkpoint]
mode = "selective"
selective_ac_option = '2'
[compile]
enable = false
components = ["model", "loss"]
[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
filter_fqns = ["output"]
[validation]
enable = false
dataset = "c4_validation"
freq = 5
steps = 10
"#;
    let resolved = from(text, &[]).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(resolved.config.training.steps, 10);
    assert_eq!(resolved.notes.len(), 5, "{:?}", resolved.notes);
}

#[test]
fn no_key_is_known_twice() {
    let mut names: Vec<_> = KEYS.iter().map(Key::full_name).collect();
    names.extend(torchtitan::names().map(str::to_owned));
    let all = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), all);
}

#[test]
fn defaults_are_within_their_own_ranges() {
    for key in KEYS {
        let value = (key.get)(&Config::default());
        assert!(key.allowed.permits(&value), "{} = {value}", key.full_name());
        assert!(!key.help().is_empty() && key.help().len() < 140, "{}", key.full_name());
    }
    assert!(check::conflicts(&Config::default()).is_empty());
}

#[test]
fn printing_gives_a_file_of_the_same_configuration() {
    let resolved = from(
        "[optimizer]\nlr = 0.1234567890123456789\n[job]\ndescription = 'say \"hi\" \\ ü'\n",
        &["--lr_scheduler.decay_ratio=0.3", "--elastic.worker_bin", "/bin/w"],
    )
    .expect("valid");
    let printed = resolved.print();
    let again = from(&printed, &[]).unwrap_or_else(|error| panic!("{error}\n{printed}"));
    assert_eq!(again.config, resolved.config);
    assert!(printed.contains("job.toml:2"), "{printed}");
    assert!(printed.contains("# suspect             800 ms"), "{printed}");
}

#[test]
fn json_is_lossless_and_checked() {
    let config =
        from("[optimizer]\nlr = 0.1234567890123456789\neps = 1e-300", &[]).expect("valid").config;
    let json = serde_json::to_string(&config).expect("plain data");
    assert_eq!(serde_json::from_str::<Config>(&json).expect("own JSON"), config);
    let error = serde_json::from_str::<Config>(r#"{"training":{"steps":0}}"#).expect_err("range");
    assert_eq!(error.to_string(), "JSON: training.steps = 0: must be an integer, ≥ 1");
}

/// TRAJ-1, DATA-2: what changes the trajectory changes the digest, nothing else does.
#[test]
fn the_digest_covers_the_trajectory() {
    let base = Config::default();
    let of = |argument: &str| {
        Config::load(None, &[argument.to_owned()]).unwrap_or_else(|error| panic!("{error}"))
    };
    for same in [
        "--job.dump_folder=x",
        "--elastic.min_nodes=3",
        "--elastic.failure_budget_ms=5000",
        "--elastic.tensor_transport=tcp",
        "--metrics.log_freq=1",
        "--checkpoint.interval=3",
        "--training.dataset_path=elsewhere",
        "--parallelism.sharding=zero1",
        "--lr_scheduler.total_steps=10000",
    ] {
        assert_eq!(of(same).digest(), base.digest(), "{same}");
    }
    for other in [
        "--training.seed=1",
        "--training.steps=20000",
        "--training.global_batch_size=64",
        "--optimizer.lr=1e-3",
        "--model.flavor=8B",
        "--lr_scheduler.min_lr_factor=0.1",
        "--training.mixed_precision_param=bfloat16",
    ] {
        assert_ne!(of(other).digest(), base.digest(), "{other}");
    }
    // Pinned: a job that was founded before an upgrade goes on after it.
    assert_eq!(hex::encode(base.digest()), PINNED);
}

const PINNED: &str = "ff857efa9e886e2459b0be4003e388de0a015b52a6ee77cc84df552cc3ff6cdc";

#[test]
fn a_joiner_takes_the_jobs_keys_and_keeps_its_own() {
    let job = Config::load(None, &["--training.seed=7".into(), "--job.dump_folder=theirs".into()])
        .expect("valid");
    let mine = Config::load(None, &["--job.dump_folder=mine".into()]).expect("valid");
    let differences: Vec<_> = mine
        .difference(&job)
        .into_iter()
        .map(|d| (d.key, d.scope, d.mine.to_string(), d.theirs.to_string()))
        .collect();
    assert_eq!(
        differences,
        [
            ("job.dump_folder".into(), Scope::Node, "\"mine\"".into(), "\"theirs\"".into()),
            ("training.seed".into(), Scope::Identity, "42".into(), "7".into()),
        ]
    );
    let adopted = mine.adopt(&job);
    assert_eq!((adopted.training.seed, adopted.job.dump_folder.as_str()), (7, "mine"));
    assert_eq!(adopted.digest(), job.digest());
}

#[test]
fn overrides_are_taken_out_of_a_command_line() {
    let arguments = |list: &[&str]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
    let (rest, overrides) = split_arguments(arguments(&[
        "elastic",
        "run",
        "job.toml",
        "--validation.enable",
        "--standalone",
        "4",
        "--training.steps",
        "3",
        "--listen=127.0.0.1:1",
        "--optimizer.lr=1",
        "--unknown.key",
        "x",
        "--training.global_batch_size",
        "-1",
        "--checkpoint.no_enable",
        "more",
    ]));
    assert_eq!(
        rest,
        arguments(&[
            "elastic",
            "run",
            "job.toml",
            "--standalone",
            "4",
            "--listen=127.0.0.1:1",
            "more"
        ])
    );
    assert_eq!(
        overrides,
        arguments(&[
            "--validation.enable",
            "--training.steps",
            "3",
            "--optimizer.lr=1",
            "--unknown.key",
            "x",
            "--training.global_batch_size",
            "-1",
            "--checkpoint.no_enable",
        ])
    );
}

#[test]
fn the_examples_are_valid() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
    let mut count = 0;
    for entry in std::fs::read_dir(examples).expect("the examples") {
        let path = entry.expect("an example").path();
        if path.extension().is_some_and(|e| e == "toml") && !path.ends_with("Cargo.toml") {
            let resolved =
                Resolved::load(Some(&path), &[]).unwrap_or_else(|error| panic!("{error}"));
            assert!(resolved.notes.is_empty(), "{:?}", resolved.notes);
            count += 1;
        }
    }
    assert!(count > 0);
}

proptest::proptest! {
    /// Whatever a file or a command line holds, it is a configuration or an error.
    #[test]
    fn nothing_from_outside_panics(
        text in "(\\[|\\]|=|\"|[a-z_.]{0,9}|training|steps|elastic|\n|-?[0-9.e]{0,25}|\\PC){0,30}",
        arguments in proptest::collection::vec("-{0,3}[a-z._=0-9é-]{0,20}", 0..5),
    ) {
        let _ = source::parse(Path::new(FILE), &text).map(|layer| resolve(&[layer]));
        let (_, overrides) = split_arguments(arguments);
        let _ = Config::load(None, &overrides);
    }

    #[test]
    fn any_text_is_printed_so_that_it_reads_back(description: String, lr in 0.0..1e300_f64) {
        let mut config = Config::default();
        config.job.description = description;
        config.optimizer.lr = lr;
        let printed = Resolved { config: config.clone(), origins: [].into(), notes: vec![] }.print();
        let again = source::parse(Path::new(FILE), &printed).and_then(|layer| resolve(&[layer]));
        proptest::prop_assert_eq!(again.map(|again| again.config).map_err(|e| e.to_string()), Ok(config));
    }
}
