//! CPU time and memory of the coordinator, from `/proc`.

use std::fs;

#[derive(Clone, Copy, Debug)]
pub(super) struct Usage {
    pub(super) rss_mib: f64,
    pub(super) cpu_s: f64,
}

pub(super) fn of(pid: u32) -> Option<Usage> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let rss_kib: f64 = rss.split_whitespace().next()?.parse().ok()?;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Fields are counted after the name, which is in parentheses and may contain anything. Fields
    // 14 and 15 of the line are utime and stime.
    let (_, fields) = stat.rsplit_once(") ")?;
    let ticks = |index: usize| fields.split(' ').nth(index)?.parse::<f64>().ok();
    Some(Usage { rss_mib: rss_kib / 1024.0, cpu_s: (ticks(11)? + ticks(12)?) / 100.0 })
}
