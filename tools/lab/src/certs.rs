//! `laxity certs`: makes a CA and certificates for a trial. This file has the arguments and the
//! output. `laxity_trial::certs` makes the files.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::{ArgGroup, Args};
use laxity_trial::certs::{DAYS_DEFAULT, DAYS_MAX, Made, Subject, make};
use serde::Serialize;

use laxity_cli::output::{json, say};
use laxity_cli::table::table;

pub(crate) const HELP: &str = "\
The first call makes a CA in the folder (ca.crt, ca.key). Every call makes a certificate and a key \
for each name, signed by that CA. If one of the files exists already, nothing is made. Only the \
owner of a key can read it.

A URI in a certificate says what it allows: laxity://daemon/HOST, laxity://viewer/NAME or \
laxity://operator/NAME. In production, your own PKI issues certificates with these URIs.

Examples:
  # a coordinator with a name and an address, two hosts, a viewer and an operator
  laxity certs --out certs --coordinator coord1.example,10.0.0.1 --daemon host1 --daemon host2 \\
      --viewer alice --operator bob

  # later: another host, with the same CA
  laxity certs --out certs --daemon host3

  # renew a certificate: remove the old files first; laxityd uses the new ones when it next connects
  rm certs/daemon-host1.*
  laxity certs --out certs --daemon host1 --days 90

Exit status: 0 on success, 1 if nothing was made (the message says why), 2 for wrong arguments.";

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("whom").required(true).multiple(true)))]
pub(crate) struct CertsArgs {
    /// Folder for the files, which is created if needed
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
    /// A coordinator, with all names and addresses that clients use for it. Repeat the option for
    /// another coordinator
    #[arg(long, value_name = "NAME[,NAME…]", group = "whom")]
    coordinator: Vec<String>,
    /// Name of a daemon's host: `coordinator.host` of its configuration, or its host name
    #[arg(long, value_name = "HOST", value_delimiter = ',', group = "whom")]
    daemon: Vec<String>,
    /// A person or tool that may read
    #[arg(long, value_name = "NAME", value_delimiter = ',', group = "whom")]
    viewer: Vec<String>,
    /// A person or tool that may read, change the policy and drain hosts
    #[arg(long, value_name = "NAME", value_delimiter = ',', group = "whom")]
    operator: Vec<String>,
    /// How many days the certificates are valid. A new CA is valid for at least 10 years
    #[arg(
        long, value_name = "DAYS", default_value_t = DAYS_DEFAULT,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(DAYS_MAX))
    )]
    days: u32,
    /// Print the list of files as JSON
    #[arg(long)]
    json: bool,
}

impl CertsArgs {
    fn subjects(&self) -> Vec<Subject> {
        let coordinators = self.coordinator.iter().map(|names| {
            let names = names.split(',').map(|name| name.trim().to_owned());
            Subject::Coordinator(names.collect())
        });
        let named = |names: &[String], of: fn(String) -> Subject| -> Vec<Subject> {
            names.iter().cloned().map(of).collect()
        };
        coordinators
            .chain(named(&self.daemon, Subject::Daemon))
            .chain(named(&self.viewer, Subject::Viewer))
            .chain(named(&self.operator, Subject::Operator))
            .collect()
    }
}

#[derive(Serialize)]
struct Listed<'a> {
    folder: &'a Path,
    made: Vec<Entry<'a>>,
}

#[derive(Serialize)]
struct Entry<'a> {
    role: &'a str,
    names: &'a [String],
    certificate: &'a Path,
    key: &'a Path,
    /// The end of validity, in seconds since 1970.
    valid_until_s: i64,
    valid_until: &'a str,
}

fn role(made: &Made) -> &'static str {
    made.subject.as_ref().map_or("ca", Subject::role)
}

fn names(made: &Made) -> &[String] {
    made.subject.as_ref().map_or(&[], Subject::names)
}

pub(crate) fn certs(args: &CertsArgs) -> Result<()> {
    let made = make(&args.out, &args.subjects(), args.days)
        .with_context(|| format!("no certificates in {}", args.out.display()))?;
    if args.json {
        let entry = |made| Entry {
            role: role(made),
            names: names(made),
            certificate: &made.certificate,
            key: &made.key,
            valid_until_s: made.until_s,
            valid_until: &made.until,
        };
        let listed = Listed { folder: &args.out, made: made.iter().map(entry).collect() };
        return Ok(say(json(&listed)?)?);
    }
    let mut rows = table(&["for", "name", "certificate", "key", "good until"]);
    for one in &made {
        let name = match &one.subject {
            None => "-".to_owned(),
            Some(subject) => subject.names().join(", "),
        };
        rows.add_row(vec![
            role(one).to_owned(),
            name,
            one.certificate.display().to_string(),
            one.key.display().to_string(),
            one.until.clone(),
        ]);
    }
    Ok(say(format!("{rows}\n\n{}", next(&args.out, &made)))?)
}

/// Returns the name of a coordinator for which an earlier call made a certificate.
fn coordinator_of(folder: &Path) -> Option<String> {
    let files = fs::read_dir(folder).ok()?.flatten();
    let names = files.filter_map(|file| {
        let name = file.file_name().into_string().ok()?;
        let name = name.strip_prefix("coordinator-")?.strip_suffix(".crt")?;
        Some(name.to_owned())
    });
    names.min()
}

fn endpoint(folder: &Path, made: &[Made]) -> String {
    let coordinator = made.iter().find_map(|one| match &one.subject {
        Some(Subject::Coordinator(names)) => names.first().cloned(),
        _ => None,
    });
    let coordinator = coordinator.or_else(|| coordinator_of(folder));
    let coordinator = coordinator.unwrap_or_else(|| "COORDINATOR".into());
    match coordinator.contains(':') {
        true => format!("https://[{coordinator}]:7471"),
        false => format!("https://{coordinator}:7471"),
    }
}

fn of<'a>(made: &'a [Made], wanted: &'static str) -> impl Iterator<Item = &'a Made> {
    made.iter().filter(move |one| role(one) == wanted)
}

fn services(text: &mut String, made: &[Made], endpoint: &str, ca: &Path) {
    let file = |path: &Path| {
        let name = path.file_name().unwrap_or_default();
        format!("/etc/laxity/{}", name.to_string_lossy())
    };
    for one in of(made, "coordinator") {
        let _ = write!(
            text,
            "\n* On the coordinator's host ({}), in /etc/laxity/coordinator.toml; `listen` has to \
             be an address that daemons reach:\n\n      [tls]\n      cert = {:?}\n      key = \
             {:?}\n      client_ca = \"/etc/laxity/ca.crt\"\n",
            names(one).join(", "),
            file(&one.certificate),
            file(&one.key),
        );
    }
    let hosts: Vec<&str> = of(made, "daemon").flat_map(names).map(String::as_str).collect();
    if let (Some(one), Some((host, others))) = (of(made, "daemon").next(), hosts.split_first()) {
        let _ = write!(
            text,
            "\n* On {host}, in /etc/laxity/laxityd.toml (`host` only if the kernel has another \
             name), then `systemctl restart laxityd`:\n\n      [coordinator]\n      endpoint = \
             {endpoint:?}\n      host = {host:?}\n      ca = \"/etc/laxity/ca.crt\"\n      cert = \
             {:?}\n      key = {:?}\n",
            file(&one.certificate),
            file(&one.key),
        );
        if !others.is_empty() {
            let _ =
                write!(text, "\n  And with their own names and files on {}.\n", others.join(", "));
        }
    }
    if let Some(one) = of(made, "coordinator").chain(of(made, "daemon")).next() {
        let _ = write!(
            text,
            "\n  Copy the files there so that the services' user can read them, such as\n\n      \
             install -o laxity -g laxity -m 0600 {} /etc/laxity/\n      install -m 0644 {} {} \
             /etc/laxity/\n\n  Then `laxity-coordinator --check` and `laxityd --check-config` say \
             whether they can be used.\n",
            one.key.display(),
            ca.display(),
            one.certificate.display(),
        );
    }
}

/// Returns the text that says where to put each file. Paths on this machine are in `folder`, and
/// paths on the target machines are in `/etc/laxity`.
fn next(folder: &Path, made: &[Made]) -> String {
    let endpoint = endpoint(folder, made);
    let ca = folder.join("ca.crt");
    let mut text = String::from("Next:\n");
    services(&mut text, made, &endpoint, &ca);
    for one in of(made, "viewer").chain(of(made, "operator")) {
        let _ = write!(
            text,
            "\n* {}, of role {}:\n\n      laxity cluster hosts --endpoint {endpoint} --ca {} \
             --cert {} --key {}\n",
            names(one).join(", "),
            role(one),
            ca.display(),
            one.certificate.display(),
            one.key.display(),
        );
    }
    let _ = write!(
        text,
        "\n* Keep {} to yourself: whoever has it can be anybody. It is needed for more \
         certificates only, and goes nowhere else.",
        folder.join("ca.key").display()
    );
    text
}
