//! The guest's network: two RDMA devices that reach each other only through a router.
//!
//! ```text
//!  initial namespace                    namespace `router`
//!  rxe0 on v0 10.77.0.1 ───────────── r0 10.77.0.254 ┐ forwards; each port
//!  rxe1 on v1 10.77.1.1 ───────────── r1 10.77.1.254 ┘ counts and shapes what leaves it
//! ```
//!
//! rxe (Linux 6.1) works in the initial namespace only, so both devices are there, and the kernel
//! would deliver between two local addresses without a wire. Therefore rules before the `local`
//! table send traffic *to* either address across the router. Only packets that *arrive* on v0 or v1
//! use the `local` table first. (With rules on `iif lo` instead, rdma_cm rejects connections.)
//!
//! The router's ports do the shaping, because a queueing discipline on rxe's own interface panics
//! the guest (`validate_xmit_skb`) or hangs `destroy_qp`.
//!
//! A port is a TBF with a `prio` inside. The token bucket asks `prio` again for each packet, so
//! priority is strict. A `clsact` hook before it counts by DSCP, with one hash look-up for all 64.

use std::fs;
use std::io::{self, Write as _};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::child::{output, poll};
use crate::config::LabConfig;
use crate::error::LabError;
use crate::fabric;
use crate::sandbox;
use crate::vm::task::PATIENCE;

pub const ROUTER: &str = "router";
pub const DEVICES: [&str; 2] = ["rxe0", "rxe1"];
pub const INTERFACES: [&str; 2] = ["v0", "v1"];
pub const ADDRESSES: [&str; 2] = ["10.77.0.1", "10.77.1.1"];
pub const PORTS: [&str; 2] = ["r0", "r1"];

/// MTU of every link, in bytes. It holds RoCE's 4096 and the headers.
pub const MTU: u32 = 4200;

/// Capacity of each of the router's queues, in packets. rxe sends about 128 per queue pair without
/// an acknowledgement, and goodput collapses when they are dropped.
const QUEUE_PACKETS: u32 = 1000;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkConfig {
    /// Rate of each of the router's ports, in Mbit/s. `None` means no shaping and no queues.
    pub rate_mbit: Option<u32>,
    /// DSCPs in strict order of priority, highest first, at most 16. They must include 0, which
    /// serves all DSCPs that are not listed.
    pub dscp_order: Vec<u8>,
}

impl Default for NetworkConfig {
    /// Returns a network without shaping, with the DSCPs of the lab in namespaces.
    fn default() -> Self {
        let lab = LabConfig::default();
        let dscp_order = fabric::classes(&lab.level_dscp, lab.scavenger_dscp).unwrap_or_default();
        Self { rate_mbit: None, dscp_order }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadNetwork {
    #[error("dscp_order: 1 to 16 different DSCPs below 64, 0 among them")]
    DscpOrder,
    #[error("rate_mbit: must be above 0; leave it out for no shaping")]
    Rate,
}

impl NetworkConfig {
    pub fn validate(&self) -> Result<(), BadNetwork> {
        let mut sorted = self.dscp_order.clone();
        sorted.sort_unstable();
        sorted.dedup();
        let whole = sorted.len() == self.dscp_order.len();
        if !whole || sorted.len() > 16 || sorted.first() != Some(&0) || sorted.last() > Some(&63) {
            return Err(BadNetwork::DscpOrder);
        }
        if self.rate_mbit == Some(0) {
            return Err(BadNetwork::Rate);
        }
        Ok(())
    }
}

fn mac(host: usize, router: bool) -> String {
    format!("02:4c:58:01:{:02x}:{host:02x}", u8::from(router))
}

/// Returns the `ip -batch` input for the initial namespace. It also makes the router's namespace.
fn hosts_script() -> String {
    let mut script = format!("netns add {ROUTER}\nlink set lo up\n");
    for host in 0..2 {
        let (device, address, port) = (INTERFACES[host], ADDRESSES[host], PORTS[host]);
        let (mac, gateway_mac) = (mac(host, false), mac(host, true));
        let gateway = gateway(host);
        let (table, other) = (100 + host, ADDRESSES[1 - host]);
        // The neighbours are static, because an ARP request must not wait behind data.
        script += &format!(
            "link add {device} mtu {MTU} address {mac} type veth peer name {port} mtu {MTU} \
             address {gateway_mac} netns {ROUTER}\n\
             link set {device} addrgenmode none up\n\
             addr add {address}/24 dev {device}\n\
             neigh replace {gateway} lladdr {gateway_mac} dev {device} nud permanent\n\
             route add default via {gateway} dev {device} src {address} table {table}\n\
             rule add pref {} iif {device} lookup local\n\
             rule add pref {} to {other} lookup {table}\n",
            100 + host,
            200 + host,
        );
    }
    script.push_str("rule add pref 500 lookup local\nrule del pref 0\n");
    script
}

fn gateway(host: usize) -> String {
    format!("10.77.{host}.254")
}

fn router_script() -> String {
    let mut script = String::from("link set lo up\n");
    for host in 0..2 {
        let (port, address, gateway) = (PORTS[host], ADDRESSES[host], gateway(host));
        let host_mac = mac(host, false);
        script += &format!(
            "link set {port} addrgenmode none up\n\
             addr add {gateway}/24 dev {port}\n\
             neigh replace {address} lladdr {host_mac} dev {port} nud permanent\n"
        );
    }
    script
}

fn ports_script(config: &NetworkConfig) -> String {
    let mut script = String::new();
    for port in PORTS {
        script += &format!("qdisc add dev {port} clsact\n");
        for dscp in 0..64 {
            script += &format!(
                "filter add dev {port} egress protocol ip prio 1 handle {} flower ip_tos \
                 {:#04x}/0xfc action continue\n",
                dscp + 1,
                dscp << 2,
            );
        }
        if let Some(rate_mbit) = config.rate_mbit {
            script.push_str(&shaping_script(port, rate_mbit, config));
        }
    }
    script
}

/// Returns the `tc -batch` input for a token bucket that contains a queue per DSCP.
fn shaping_script(port: &str, rate_mbit: u32, config: &NetworkConfig) -> String {
    // The burst is two milliseconds of the rate, but at least two packets.
    let burst = (u64::from(rate_mbit) * 250).max(2 * (u64::from(MTU) + 14));
    let bands = config.dscp_order.len().max(2);
    let others = config.dscp_order.iter().position(|&dscp| dscp == 0).unwrap_or(0);
    let map = vec![others.to_string(); 16].join(" ");
    let mut script = format!(
        "qdisc add dev {port} root handle 1: tbf rate {rate_mbit}mbit burst {burst} limit 1000000\n\
         qdisc add dev {port} parent 1:1 handle 2: prio bands {bands} priomap {map}\n"
    );
    for (band, dscp) in config.dscp_order.iter().enumerate() {
        let class = band + 1;
        script += &format!(
            "qdisc add dev {port} parent 2:{class:x} handle 1{class:x}: pfifo limit \
             {QUEUE_PACKETS}\n\
             filter add dev {port} parent 2: protocol ip prio 1 flower ip_tos {:#04x}/0xfc \
             classid 2:{class:x}\n",
            dscp << 2,
        );
    }
    script
}

pub(super) fn call(program: &str, args: &[&str], input: &str) -> Result<String, LabError> {
    let line = format!("{program} {}", args.join(" "));
    output(line, Command::new(program).args(args), input).map_err(|error| match error {
        LabError::Start { cause, .. } if cause.kind() == io::ErrorKind::NotFound => {
            LabError::missing(program, "run `tools/setup.sh verbs`")
        }
        other => other,
    })
}

pub fn build(config: &NetworkConfig) -> Result<u32, LabError> {
    // Each program gets a batch, because an emulated processor takes 0.1 s to start a program.
    call("ip", &["-batch", "-"], &hosts_script())?;
    call("ip", &["-n", ROUTER, "-batch", "-"], &router_script())?;
    forward_in_router()?;
    for interface in ["all", INTERFACES[0], INTERFACES[1]] {
        for (name, value) in [("rp_filter", "0"), ("accept_local", "1")] {
            let path = format!("/proc/sys/net/ipv4/conf/{interface}/{name}");
            fs::write(&path, value).map_err(LabError::file("writing", &path))?;
        }
    }
    call("tc", &["-n", ROUTER, "-batch", "-"], &ports_script(config))?;
    keep_order()?;
    let devices: String = (DEVICES.iter().zip(INTERFACES))
        .map(|(device, interface)| format!("link add {device} type rxe netdev {interface}\n"))
        .collect();
    call("rdma", &["-b", "-"], &devices)?;
    let indices = [wait_for_gid(0)?, wait_for_gid(1)?];
    if indices[0] != indices[1] {
        let problem = format!("have RoCEv2 GIDs of different indices: {indices:?}");
        return Err(LabError::Device { device: DEVICES.join(" and "), problem });
    }
    Ok(indices[0])
}

/// Disturbs the router's ports, which must not be shaped. It keeps `tc` running, because an
/// emulated processor takes long to start a program.
#[derive(Debug)]
pub struct Disturber(Child);

impl Disturber {
    pub fn start() -> Result<Self, LabError> {
        // What `-force` passes over in silence would fail here.
        for host in 0..PORTS.len() {
            call("tc", &["-n", ROUTER, "-batch", "-"], &loss(host, 0))?;
        }
        let mut command = Command::new("tc");
        command.args(["-force", "-n", ROUTER, "-batch", "-"]).stdin(Stdio::piped());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().map(Self).map_err(LabError::start("tc"))
    }

    /// Lets a port lose a share of its packets. A link that is down loses all: without a carrier,
    /// rxe (Linux 6.1) would never leave the processor again.
    pub fn lose(&mut self, host: usize, percent: u32) -> Result<(), LabError> {
        let stdin = self.0.stdin.as_mut().ok_or_else(LabError::no_pipe)?;
        let line = loss(host, percent);
        stdin.write_all(line.as_bytes()).map_err(LabError::system("telling the router"))
    }
}

impl Drop for Disturber {
    fn drop(&mut self) {
        // `tc` ends when it has read all. The commands after it fail if it could not do its work.
        drop(self.0.stdin.take());
        let _ = self.0.wait();
        for host in 0..PORTS.len() {
            let _ = call("tc", &["-n", ROUTER, "-batch", "-"], &loss(host, 0));
        }
    }
}

fn loss(host: usize, percent: u32) -> String {
    let port = PORTS[host];
    format!("qdisc replace dev {port} root netem limit {QUEUE_PACKETS} loss {percent}%\n")
}

/// Enables forwarding in the router. A thread of its own enters the router's network namespace,
/// because /proc/sys shows the settings of the thread's namespace.
fn forward_in_router() -> Result<(), LabError> {
    let forward = || -> Result<(), LabError> {
        sandbox::enter_host(ROUTER)?;
        fs::write("/proc/sys/net/ipv4/ip_forward", "1")
            .map_err(LabError::system("writing ip_forward"))
    };
    std::thread::scope(|scope| scope.spawn(forward).join())
        .map_err(|_| LabError::program("the thread in the router's namespace", "panicked"))?
        .map_err(LabError::step("making the router forward"))
}

/// Steers the packets of each flow to one processor, so that they stay in order. By default a veth
/// handles packets on the processor that sends them, and a queue pair's sender moves between
/// processors. Packets then overtake others, and rxe asks for them again. If the last ones are
/// missing, it waits for its timeout.
fn keep_order() -> Result<(), LabError> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let mask = format!("{:x}", (1_u64 << processors.min(32)) - 1);
    let file = |interface| format!("/sys/class/net/{interface}/queues/rx-0/rps_cpus");
    for interface in INTERFACES {
        let path = file(interface);
        fs::write(&path, &mask).map_err(LabError::file("writing", &path))?;
    }
    // `ip netns exec` mounts a /sys that has the router's interfaces.
    let script = PORTS.map(|port| format!("echo {mask} > {}", file(port)));
    let script = script.join(" && ");
    let exec = ["netns", "exec", ROUTER, "sh", "-c", &script];
    call("ip", &exec, "").map(drop)
}

/// Waits until a device's port is active and has the GID of its address. Returns the GID's index.
fn wait_for_gid(host: usize) -> Result<u32, LabError> {
    let port = format!("/sys/class/infiniband/{}/ports/1", DEVICES[host]);
    let read = |name: &str| {
        let text = fs::read_to_string(format!("{port}/{name}")).unwrap_or_default();
        text.trim().to_owned()
    };
    let gid = format!("0000:0000:0000:0000:0000:ffff:0a4d:{host:02x}01");
    let gid_index = || {
        (0..16).find(|index| {
            read(&format!("gids/{index}")) == gid
                && read(&format!("gid_attrs/types/{index}")) == "RoCE v2"
        })
    };
    let is_active = || read("state").contains("ACTIVE");
    let look = || gid_index().filter(|_| is_active());
    poll(PATIENCE, Duration::from_millis(5), look).ok_or_else(|| {
        let there = if gid_index().is_some() { "is there" } else { "is not there" };
        let state = read("state");
        let problem = format!("does not come up: its port is `{state}`, GID {gid} {there}");
        LabError::Device { device: DEVICES[host].to_owned(), problem }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_that_cannot_be_built_is_refused() {
        assert_eq!(NetworkConfig::default().validate(), Ok(()));
        let check = |change: fn(&mut NetworkConfig)| {
            let mut config = NetworkConfig::default();
            change(&mut config);
            config.validate()
        };
        let order = Err(BadNetwork::DscpOrder);
        assert_eq!(check(|c| c.dscp_order = vec![46, 8]), order, "0 is lacking");
        assert_eq!(check(|c| c.dscp_order = vec![46, 0, 46]), order);
        assert_eq!(check(|c| c.dscp_order = vec![64, 0]), order);
        assert_eq!(check(|c| c.dscp_order = (0..17).collect()), order);
        assert_eq!(check(|c| c.rate_mbit = Some(0)), Err(BadNetwork::Rate));
    }

    #[test]
    fn nothing_is_queued_at_the_devices_own_interfaces() {
        let config = NetworkConfig { rate_mbit: Some(24), ..NetworkConfig::default() };
        let script = ports_script(&config);
        for line in script.lines() {
            assert!(line.contains(" dev r0 ") || line.contains(" dev r1 "), "{line}");
        }
        assert!(script.contains("tbf rate 24mbit burst 8428 "), "two packets at least");
        assert!(script.contains("prio bands 8 priomap 5 5 5"), "unmarked is class 6");
        assert!(script.contains("flower ip_tos 0xb8/0xfc classid 2:2\n"));
    }
}
