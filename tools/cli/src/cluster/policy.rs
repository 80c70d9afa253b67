//! `laxity cluster policy get`, `set` and `history`.

use clap::{Args, Subcommand};
use laxity_quantity::Nanos;
use laxity_wire::v1::{
    GetPolicyRequest, GetPolicyResponse, Policy, PolicyRevision, SetPolicyRequest,
};

use super::client::CoordinatorArgs;
use super::error::ClusterError;
use super::tables;

/// The commands of `laxity cluster policy`.
#[derive(Debug, Subcommand)]
pub(crate) enum PolicyCommand {
    /// Show the current policy
    Get(GetArgs),
    /// Change some keys of the policy. The change takes effect at once, without a restart
    #[command(after_long_help = SET_HELP)]
    Set(SetArgs),
    /// List the changes of the policy, newest first
    History(HistoryArgs),
}

const SET_HELP: &str = "\
Keys:
  policy               mfs or laxity; they differ in doomed requests and worst-case estimates
  drop_budget          maximum number of pruned requests of tenants without their own budget
  debounce             time for which events are gathered before a run of admission, such as 3ms
  rank_margin          smallest change of a batch's deadline that is sent to daemons, such as 2ms
  correction_permille  weight of each finished batch in the correction of estimates, in thousandths

Examples:
  laxity cluster policy set drop_budget=32 --dry-run
  laxity cluster policy set policy=mfs --comment 'as in the paper' --expect 3";

#[derive(Debug, Args)]
pub(crate) struct GetArgs {
    #[command(flatten)]
    coordinator: CoordinatorArgs,
}

#[derive(Debug, Args)]
pub(crate) struct SetArgs {
    /// Keys with their new values; --help lists the keys
    #[arg(required = true, value_name = "KEY=VALUE")]
    changes: Vec<String>,
    /// Reason, which the history shows
    #[arg(long, value_name = "TEXT")]
    comment: Option<String>,
    /// Change the policy only if this is still its revision
    #[arg(long, value_name = "REVISION", default_value_t = 0, hide_default_value = true)]
    expect: u64,
    /// Check the change without making it
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    coordinator: CoordinatorArgs,
}

#[derive(Debug, Args)]
pub(crate) struct HistoryArgs {
    /// Maximum number of revisions
    #[arg(long, value_name = "N", default_value_t = 20)]
    limit: u32,
    #[command(flatten)]
    coordinator: CoordinatorArgs,
}

pub(super) fn run(command: &PolicyCommand) -> Result<(), ClusterError> {
    match command {
        PolicyCommand::Get(args) => get(args),
        PolicyCommand::Set(args) => set(args),
        PolicyCommand::History(args) => history(args),
    }
}

fn ask(coordinator: &CoordinatorArgs, history: u32) -> Result<GetPolicyResponse, ClusterError> {
    coordinator.ask(async |operator| operator.get_policy(GetPolicyRequest { history }).await)
}

fn get(args: &GetArgs) -> Result<(), ClusterError> {
    let told = ask(&args.coordinator, 0)?;
    let current = told.current.ok_or(ClusterError::NoPolicy)?;
    if told.leading == Some(false) {
        eprintln!("This coordinator does not lead. The leader's policy may be another.");
    }
    args.coordinator.tell(&current, || tables::revision(&current))
}

fn history(args: &HistoryArgs) -> Result<(), ClusterError> {
    let told = ask(&args.coordinator, args.limit.saturating_sub(1))?;
    args.coordinator.tell(&told, || {
        let revisions: Vec<PolicyRevision> =
            told.current.iter().chain(&told.history).cloned().collect();
        tables::history(&revisions)
    })
}

fn set(args: &SetArgs) -> Result<(), ClusterError> {
    let mut change = Policy::default();
    for text in &args.changes {
        apply(&mut change, text)
            .map_err(|problem| ClusterError::Change { argument: text.clone(), problem })?;
    }
    let wanted = SetPolicyRequest {
        change: Some(change),
        comment: args.comment.clone().unwrap_or_default(),
        expected_revision: args.expect,
        dry_run: args.dry_run,
    };
    let told = args.coordinator.ask(async |operator| operator.set_policy(wanted).await)?;
    let current = told.current.ok_or(ClusterError::NoPolicy)?;
    args.coordinator.tell(&current, || {
        if args.dry_run {
            format!("This would be accepted; revision {} holds unchanged.", current.revision)
        } else {
            tables::revision(&current)
        }
    })
}

fn apply(change: &mut Policy, text: &str) -> Result<(), String> {
    const KEYS: &str = "policy, drop_budget, debounce, rank_margin, correction_permille";
    let (key, value) =
        text.split_once('=').ok_or_else(|| format!("write KEY=VALUE; the keys are {KEYS}"))?;
    let number = || {
        let parsed = value.parse::<u32>();
        parsed.map(Some).map_err(|_| format!("`{value}` is no whole number"))
    };
    let nanos = || {
        let parsed = value.parse::<Nanos>();
        parsed.map(|nanos| Some(nanos.0)).map_err(|error| error.to_string())
    };
    match key {
        "policy" => change.policy = Some(value.to_owned()),
        "drop_budget" => change.drop_budget = number()?,
        "debounce" => change.debounce_ns = nanos()?,
        "rank_margin" => change.rank_margin_ns = nanos()?,
        "correction_permille" => change.correction_permille = number()?,
        _ => return Err(format!("there is no such key; the keys are {KEYS}")),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_that_is_shown_can_be_set_to_what_is_shown() {
        let all = Policy {
            policy: Some("mfs".into()),
            drop_budget: Some(1),
            debounce_ns: Some(2_500_000),
            rank_margin_ns: Some(1),
            correction_permille: Some(3),
        };
        let mut read = Policy::default();
        for (key, value) in tables::policy(&all) {
            apply(&mut read, &format!("{key}={value}")).expect("taken");
            assert!(SET_HELP.contains(key), "{key} is not in the help");
        }
        assert_eq!(read, all);
    }

    #[test]
    fn what_cannot_be_set_names_what_can() {
        let mut change = Policy::default();
        for (text, problem) in [
            ("drop_budget", "KEY=VALUE"),
            ("colour=red", "the keys are policy"),
            ("drop_budget=-1", "no whole number"),
            ("debounce=3", "3"),
        ] {
            let error = apply(&mut change, text).expect_err(text);
            assert!(error.contains(problem), "{text}: {error}");
        }
        assert_eq!(change, Policy::default());
    }
}
