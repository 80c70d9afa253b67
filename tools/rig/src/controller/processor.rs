//! Processor time of the lab and of the whole machine, in jiffies.

use std::fs;
use std::path::Path;

/// Returns the processor time of all processes of the lab's pid namespace so far.
pub(super) fn lab_jiffies() -> u64 {
    let namespace = |process: &Path| fs::read_link(process.join("ns/pid")).ok();
    let own = namespace(Path::new("/proc/self"));
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_name().to_string_lossy().parse::<u32>().is_ok())
        .map(|entry| entry.path())
        .filter(|process| own.is_some() && namespace(process) == own)
        .filter_map(|process| fs::read_to_string(process.join("stat")).ok())
        .map(|stat| process_jiffies(&stat))
        .sum()
}

/// Returns the processor time of a process and of the children that it waited for.
fn process_jiffies(stat: &str) -> u64 {
    // utime stime cutime cstime follow eleven columns after the name, which may contain spaces.
    let columns = stat.rsplit(") ").next().unwrap_or_default().split_whitespace();
    columns.skip(11).take(4).filter_map(|column| column.parse::<u64>().ok()).sum()
}

pub(super) fn busy_jiffies() -> u64 {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let Some(line) = stat.lines().next() else { return 0 };
    let columns: Vec<u64> =
        line.split_whitespace().skip(1).filter_map(|column| column.parse().ok()).collect();
    // user nice system idle iowait irq softirq steal. Later columns are contained in user and nice.
    columns.iter().take(8).enumerate().filter(|(i, _)| *i != 3 && *i != 4).map(|(_, n)| n).sum()
}
