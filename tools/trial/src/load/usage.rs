//! CPU time and memory of a coordinator, from `/proc`. A coordinator that is named by its endpoint
//! is found by its port, if it runs on this machine and this user can read its files.

use std::fs;

/// Memory and CPU time of a process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Usage {
    pub(super) rss_mib: f64,
    pub(super) cpu_s: f64,
}

/// Returns the usage of a process, or `None` if there is no such process.
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

/// Returns the process on this machine that listens at `endpoint`.
pub(super) fn listener(endpoint: &str) -> Option<u32> {
    let authority = endpoint.split_once("://").map_or(endpoint, |(_, rest)| rest);
    let (host, port) = authority.trim_end_matches('/').rsplit_once(':')?;
    let here = host == "localhost"
        || host
            .trim_matches(['[', ']'])
            .parse::<std::net::IpAddr>()
            .is_ok_and(|address| address.is_loopback());
    if !here {
        return None;
    }
    let port: u16 = port.parse().ok()?;
    let socket = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .filter_map(|table| fs::read_to_string(table).ok())
        .find_map(|table| listening_socket(&table, port))?;
    let socket = format!("socket:[{socket}]");
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.find(|pid| {
        let files = fs::read_dir(format!("/proc/{pid}/fd"));
        files.is_ok_and(|files| {
            let mut targets = files.flatten().filter_map(|file| fs::read_link(file.path()).ok());
            targets.any(|target| target.as_os_str() == socket.as_str())
        })
    })
}

/// Returns the inode of the socket that listens on `port`, from a table such as `/proc/net/tcp`.
fn listening_socket(table: &str, port: u16) -> Option<u64> {
    const LISTEN: &str = "0A";
    table.lines().skip(1).find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (_, at) = fields.get(1)?.rsplit_once(':')?;
        let same = u16::from_str_radix(at, 16).ok()? == port && *fields.get(3)? == LISTEN;
        same.then(|| fields.get(9)?.parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_listener_of_an_endpoint_is_found_and_none_where_nobody_listens() {
        let listens = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listens.local_addr().expect("bound");
        let pid = listener(&format!("http://{address}"));
        assert_eq!(pid, Some(std::process::id()));
        assert!(pid.and_then(of).is_some_and(|usage| usage.rss_mib > 0.0));
        drop(listens);
        assert_eq!(listener(&format!("http://{address}")), None);
        assert_eq!(listener("http://192.0.2.1:7471"), None);
    }
}
