//! The choice of a device port's address, by the rules of `NCCL_IB_GID_INDEX`, and its speed.

use std::net::{IpAddr, Ipv6Addr};

/// The kind of an entry in a device port's GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum GidKind {
    /// InfiniBand, or RoCE v1, which no router forwards.
    Other,
    /// RoCE v2, which uses UDP.
    RoceV2,
}

impl GidKind {
    /// Parses the text in `gid_attrs/types`.
    pub(super) fn parse(text: &str) -> Self {
        if text.trim() == "RoCE v2" { Self::RoceV2 } else { Self::Other }
    }
}

/// An entry of the GID table that is not empty.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gid {
    pub(super) index: u8,
    pub(super) raw: [u8; 16],
    pub(super) kind: GidKind,
}

/// Returns the address in a GID. RoCE's GIDs are IP addresses, with IPv4 mapped into IPv6.
pub(super) fn address(raw: [u8; 16]) -> IpAddr {
    let v6 = Ipv6Addr::from(raw);
    v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)
}

/// Returns the best entry of a RoCE device port: RoCE v2 before v1, then IPv4 before IPv6 before
/// link-local, and the first of equals.
pub(super) fn best(gids: &[Gid]) -> Option<Gid> {
    let rank = |gid: &Gid| {
        let reach = match address(gid.raw) {
            IpAddr::V4(v4) if v4.is_link_local() => 1,
            IpAddr::V4(_) => 3,
            IpAddr::V6(v6) if v6.is_unicast_link_local() => 0,
            IpAddr::V6(_) => 2,
        };
        (gid.kind, reach)
    };
    // `max_by_key` returns the last of equals, hence the reversal.
    gids.iter().rev().max_by_key(|gid| rank(gid)).copied()
}

/// Parses the kernel's text for a rate into Mbit/s, such as `200 Gb/sec (4X HDR)`.
pub(super) fn rate_mbit(text: &str) -> Option<i32> {
    let number: f64 = text.split_whitespace().next()?.parse().ok()?;
    (text.contains("Gb/sec") && number > 0.0 && number < 1e6).then_some((number * 1000.0) as i32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn gid(index: u8, address: &str, kind: GidKind) -> Gid {
        let raw = match address.parse().expect("an address") {
            IpAddr::V4(v4) => Ipv4Addr::to_ipv6_mapped(&v4).octets(),
            IpAddr::V6(v6) => v6.octets(),
        };
        Gid { index, raw, kind }
    }

    #[test]
    fn the_best_gid_is_version_2_with_an_ipv4_address() {
        use GidKind::{Other, RoceV2};
        let mut gids = vec![gid(0, "fe80::1", Other), gid(1, "fe80::1", RoceV2)];
        assert_eq!(best(&gids).map(|gid| gid.index), Some(1));
        gids.push(gid(2, "10.0.0.1", Other));
        assert_eq!(best(&gids).map(|gid| gid.index), Some(1));
        gids.push(gid(3, "fd00::1", RoceV2));
        assert_eq!(best(&gids).map(|gid| gid.index), Some(3));
        gids.push(gid(5, "10.0.0.1", RoceV2));
        gids.push(gid(7, "10.0.0.2", RoceV2));
        assert_eq!(best(&gids).map(|gid| gid.index), Some(5));
        assert_eq!(address(gids[4].raw), IpAddr::from([10, 0, 0, 1]));
        assert!(best(&[]).is_none());
    }

    #[test]
    fn a_speed_is_the_number_before_its_unit() {
        assert_eq!(rate_mbit("800 Gb/sec (4X XDR)\n"), Some(800_000));
        assert_eq!(rate_mbit("2.5 Gb/sec (1X SDR)"), Some(2_500));
        assert_eq!(rate_mbit("fast"), None);
    }
}
