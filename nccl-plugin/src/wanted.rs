//! Lists of network interfaces and RDMA devices in the format of `NCCL_SOCKET_IFNAME` and
//! `NCCL_IB_HCA`: `mlx5_0:1,mlx5_1`, `^mlx5_bond`, `=mlx5_0`, `^=mlx5_3:2`.
//!
//! Names are prefixes unless `=` asks for whole names. `^` excludes what the list names. A port may
//! follow a name. Rail and plane, which may follow the port since NCCL 2.28, are ignored.

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wanted {
    not: bool,
    exact: bool,
    /// Names and ports. A name without a port stands for all ports.
    names: Vec<(String, Option<u8>)>,
}

impl Wanted {
    /// Parses the variable. Returns the list, and the parts that can't be used.
    pub(crate) fn parse(text: &str) -> (Self, Vec<String>) {
        let prefixed = |text: &str, prefix| {
            let rest = text.strip_prefix(prefix).map(str::to_owned);
            (rest.is_some(), rest.unwrap_or_else(|| text.to_owned()))
        };
        let (not, text) = prefixed(text.trim(), '^');
        let (exact, text) = prefixed(&text, '=');
        let mut problems = Vec::new();
        let mut names = Vec::new();
        let entries = text.split(',').map(str::trim);
        for entry in entries.filter(|entry| !entry.is_empty()) {
            let mut fields = entry.split(':');
            let name = fields.next().unwrap_or_default().to_owned();
            let port = fields.next().filter(|port| !port.is_empty());
            let number = port.and_then(|port| port.parse().ok());
            if let Some(port) = port.filter(|_| number.is_none()) {
                problems
                    .push(format!("`{entry}`: `{port}` is no port number; all ports are meant"));
            }
            names.push((name, number));
        }
        (Self { not, exact, names }, problems)
    }

    /// Reports whether a port of a device is to be used. An empty list takes all.
    pub(crate) fn takes(&self, name: &str, port: u8) -> bool {
        self.names.is_empty() || self.fits(name, Some(port)) != self.not
    }

    /// Reports whether an interface is to be used. Interfaces have no ports.
    pub(crate) fn takes_interface(&self, name: &str) -> bool {
        self.fits(name, None) != self.not
    }

    fn fits(&self, name: &str, port: Option<u8>) -> bool {
        self.names.iter().any(|(wanted, wanted_port)| {
            let named = if self.exact { name == wanted } else { name.starts_with(wanted.as_str()) };
            named && (wanted_port.is_none() || port.is_none() || *wanted_port == port)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn taken(text: &str) -> Vec<String> {
        let (wanted, _) = Wanted::parse(text);
        let all = [("mlx5_0", 1), ("mlx5_0", 2), ("mlx5_1", 1), ("mlx5_10", 1), ("rxe0", 1)];
        all.iter()
            .filter(|(name, port)| wanted.takes(name, *port))
            .map(|(name, port)| format!("{name}:{port}"))
            .collect()
    }

    #[test]
    fn devices_are_taken_by_beginning_whole_name_port_and_exclusion() {
        assert_eq!(taken("").len(), 5);
        assert_eq!(taken("mlx5_1"), ["mlx5_1:1", "mlx5_10:1"]);
        assert_eq!(taken("=mlx5_1"), ["mlx5_1:1"]);
        assert_eq!(taken("mlx5_0:2,rxe"), ["mlx5_0:2", "rxe0:1"]);
        assert_eq!(taken("^mlx5_1,rxe"), ["mlx5_0:1", "mlx5_0:2"]);
        assert_eq!(taken("^=mlx5_1,mlx5_0:1"), ["mlx5_0:2", "mlx5_10:1", "rxe0:1"]);
        // The entry has a rail and a plane.
        assert_eq!(taken("=mlx5_0:1:3:0"), ["mlx5_0:1"]);
        assert_eq!(taken("=none"), Vec::<String>::new());
        assert_eq!(taken("^").len(), 5);
    }

    #[test]
    fn a_port_that_is_no_number_is_said() {
        let (wanted, problems) = Wanted::parse("mlx5_0:one");
        assert!(problems[0].contains("`one` is no port number"), "{problems:?}");
        assert!(wanted.takes("mlx5_0", 2));
    }

    proptest! {
        #[test]
        fn any_text_is_a_wish(text in ".{0,40}", name in "[a-z0-9_]{1,10}", port in any::<u8>()) {
            let (wanted, _) = Wanted::parse(&text);
            let _ = wanted.takes(&name, port);
        }
    }
}
