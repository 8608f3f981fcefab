//! `elastic plan`: what a mesh of so many nodes costs, before anything runs.

use job::{
    estimate::{Run, best_interval, goodput, tree_cost},
    mesh::Mesh,
};

use super::{
    fail, print,
    print::{bytes, grouped},
};
use crate::{
    cli::PlanArgs,
    config::{Config, schema},
    exit::Exit,
};

/// Runs the command.
pub(super) fn plan(args: &PlanArgs) -> Exit {
    match text(args) {
        Ok(text) => {
            print(&text);
            Exit::Finished
        }
        Err(why) => fail(Exit::Usage, &why),
    }
}

fn text(args: &PlanArgs) -> Result<String, String> {
    let loaded = Config::load(args.config.as_deref(), &args.overrides);
    let mut config = loaded.map_err(|error| error.to_string())?;
    config.elastic.nproc_per_node = args.gpus_per_node;
    let ranks = args.nodes.checked_mul(args.gpus_per_node).filter(|ranks| *ranks <= MOST);
    let Some(ranks) = ranks else {
        return Err(format!(
            "{} nodes of {} devices: at most {MOST} ranks",
            args.nodes, args.gpus_per_node
        ));
    };
    let (sharding, parallel) = (config.sharding(), config.parallel());
    let mesh = parallel.fit(sharding, ranks, config.micro_batches());
    let run = run(&config, config.micro_batches().unwrap_or(mesh.degree()))?;
    if args.svg {
        let chunks = if mesh.stages == 1 { 1 } else { run.chunks };
        return Ok(run.schedule.timeline(mesh.stages, chunks, run.turns(mesh)).svg());
    }
    Ok(report(args, &config, &run, mesh, ranks))
}

/// More than any cluster, and few enough to draw.
const MOST: u32 = 1 << 20;

fn run(config: &Config, micro_batches: u32) -> Result<Run, String> {
    let (training, keys) = (&config.training, &config.parallelism);
    let recompute = &config.activation_checkpoint;
    let parallel = config.parallel();
    Ok(Run {
        shape: config.shape()?,
        seq_len: training.seq_len,
        local_batch: training.local_batch_size,
        micro_batches,
        compute_bytes: match training.mixed_precision_param {
            schema::ComputePrecision::Float32 => 4,
            schema::ComputePrecision::Bfloat16 => 2,
        },
        sharding: config.sharding(),
        schedule: config.schedule(),
        chunks: parallel.chunks(),
        ends: (
            keys.pipeline_parallel_first_stage_less_layers,
            keys.pipeline_parallel_last_stage_less_layers,
        ),
        recompute_every: match recompute.mode {
            schema::RecomputeMode::None => 0,
            schema::RecomputeMode::Full => 1,
            schema::RecomputeMode::Selective => recompute.selective_ac_option.0,
        },
        reshards: match keys.fsdp_reshard_after_forward {
            schema::Reshard::Default => parallel.stages() == 1,
            schema::Reshard::Always => true,
            schema::Reshard::Never => false,
        },
    })
}

fn report(args: &PlanArgs, config: &Config, run: &Run, mesh: Mesh, ranks: u32) -> String {
    let size = |bytes_: f64| bytes(bytes_ as u64);
    let mut out = String::new();
    let mut line = |name: &str, value: String| out += &format!("{name:<28}{value}\n");
    line("model", format!("{} parameters", grouped(run.shape.elements() as u64)));
    line("mesh", format!("{mesh} = {} ranks, {} stand by", mesh.ranks(), ranks - mesh.ranks()));
    let global = u64::from(run.micro_batches) * u64::from(run.local_batch);
    line(
        "global batch",
        format!(
            "{global} sequences = {} micro-batches of {}, {} a pipeline",
            run.micro_batches,
            run.local_batch,
            run.turns(mesh)
        ),
    );
    let memory = run.memory(mesh);
    line("memory of a device", size(memory.total()));
    line("  weights", size(memory.weights));
    line("  optimizer", size(memory.optimizer));
    line("  gradients", size(memory.gradients));
    line("  activations", size(memory.activations));
    let traffic = run.traffic(mesh);
    line("sent in a step", format!("{} by the busiest rank", size(traffic.total())));
    line("  gathers of weights", size(traffic.gather));
    line("  sums of gradients", size(traffic.reduce));
    line("  sums between replicas", size(traffic.replicas));
    line("  between stages", size(traffic.pipeline));
    if !run.sharding.cuts_gradients() {
        let cost = tree_cost(run.micro_batches, mesh.degree());
        line("  tree against a ring", format!("{cost:.2} times the bytes"));
    }
    line("bubble", format!("{:.1} %", 100.0 * run.bubble(mesh)));
    line("checkpoint", size(run.checkpoint_bytes()));
    if let Some(step) = args.step_seconds {
        let mtbf = 3600.0 / (args.failures_per_node_hour * f64::from(args.nodes)).max(1e-12);
        let recovery =
            args.recovery_seconds.unwrap_or(config.elastic.failure_budget_ms as f64 / 1e3);
        let interval = step * config.checkpoint.interval as f64;
        let live = run.survives_live(mesh);
        let redo = if live { step } else { interval };
        let share = goodput(mtbf, recovery, redo, args.save_seconds, interval);
        line(
            "goodput",
            format!(
                "{:.2} % with a failure every {:.0} s; a lost rank's state is {}",
                100.0 * share,
                mtbf,
                if live { "held by another" } else { "read from a checkpoint" }
            ),
        );
        if !live && args.save_seconds > 0.0 {
            let best = best_interval(args.save_seconds, mtbf) / step;
            line("best checkpoint.interval", format!("{:.0} steps (Young)", best.max(1.0)));
        }
    }
    if mesh.stages > 1 {
        let turns = run.turns(mesh).min(3 * mesh.stages);
        out += &format!("\nthe first {turns} micro-batches of a pipeline:\n");
        out += &run.schedule.timeline(mesh.stages, run.chunks, turns).text();
    }
    out
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::{
        cli::{Cli, Command},
        config::split_arguments,
    };

    fn plan_of(arguments: &[&str]) -> Result<String, String> {
        let all = ["elastic", "plan"].iter().chain(arguments).map(|text| (*text).to_owned());
        let (rest, overrides) = split_arguments(all.collect());
        match Cli::try_parse_from(rest).map_err(|error| error.to_string())?.command {
            Command::Plan(args) => text(&PlanArgs { overrides, ..args }),
            other => Err(format!("{other:?} is no plan")),
        }
    }

    #[test]
    fn a_plan_says_what_a_mesh_costs() {
        let text = plan_of(&[
            "--nodes=2",
            "--gpus-per-node=4",
            "--parallelism.sharding=FULL_SHARD",
            "--parallelism.pipeline_parallel_degree=2",
            "--model.flavor=debugmodel",
            "--step-seconds=1",
        ])
        .expect("a plan");
        for expected in [
            "6,163,712 parameters",
            "pp 2 × dp_replicate 1 × dp_shard 4 = 8 ranks, 0 stand by",
            "checkpoint                  74.0 MB",
            "read from a checkpoint",
            "rank 1   ·  F0 B0",
        ] {
            assert!(text.contains(expected), "{expected}\n{text}");
        }
    }

    #[test]
    fn the_impossible_is_refused_with_numbers() {
        let why = plan_of(&["--nodes=1", "--parallelism.pipeline_parallel_degree=9"]);
        let why = why.expect_err("four blocks");
        assert!(why.contains("9 blocks, the model has 4: at most 4 stages"), "{why}");
        let why = plan_of(&["--nodes=1", "--parallelism.data_parallel_shard_degree=2"]);
        assert!(why.expect_err("no sharding").contains("zero2 or zero3"));
    }
}
