//! Which kernel modules have to be loaded, and in which order: `modules.dep` as depmod(8) writes
//! it, `modules.builtin` for what needs no loading.

use std::collections::{BTreeMap, BTreeSet};

/// A kernel's modules, as depmod describes them.
#[derive(Clone, Debug, Default)]
pub struct ModuleTable {
    /// By name: path below `lib/modules/RELEASE`, and the paths that it depends on.
    modules: BTreeMap<String, (String, Vec<String>)>,
    builtin: BTreeSet<String>,
}

/// A module that the kernel neither has nor contains.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this kernel has no module `{0}`; the lab needs the stock kernel of linux-image-amd64")]
pub struct NoModule(pub String);

/// The name of a module: file name without `.ko` and what compresses it, dashes as underscores.
fn name_of(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    let name = file.split_once(".ko").map_or(file, |(name, _)| name);
    name.replace('-', "_")
}

impl ModuleTable {
    /// Reads the two tables.
    #[must_use]
    pub fn parse(modules_dep: &str, modules_builtin: &str) -> Self {
        let modules = modules_dep
            .lines()
            .filter_map(|line| line.split_once(':'))
            .map(|(path, needs)| {
                let needs = needs.split_whitespace().map(str::to_owned).collect();
                (name_of(path), (path.to_owned(), needs))
            })
            .collect();
        let builtin = modules_builtin.lines().map(name_of).collect();
        Self { modules, builtin }
    }

    /// Paths to load, each once, each after what it depends on.
    ///
    /// # Errors
    /// One of the modules, or of what they depend on, does not exist. Take another kernel.
    pub fn load_order(&self, wanted: &[&str]) -> Result<Vec<String>, NoModule> {
        let mut order = Vec::new();
        let mut seen = BTreeSet::new();
        for name in wanted {
            self.visit(&name_of(name), &mut seen, &mut order)?;
        }
        Ok(order)
    }

    fn visit(
        &self,
        name: &str,
        seen: &mut BTreeSet<String>,
        order: &mut Vec<String>,
    ) -> Result<(), NoModule> {
        if self.builtin.contains(name) || !seen.insert(name.to_owned()) {
            return Ok(());
        }
        let (path, needs) = self
            .modules
            .get(name)
            .ok_or_else(|| NoModule(name.to_owned()))?;
        // depmod lists what has to be first last.
        for need in needs.iter().rev() {
            self.visit(&name_of(need), seen, order)?;
        }
        order.push(path.clone());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEP: &str = "kernel/fs/9p/9p.ko: kernel/net/9p/9pnet.ko kernel/fs/netfs/netfs.ko\n\
        kernel/net/9p/9pnet.ko:\nkernel/fs/netfs/netfs.ko.xz:\n\
        kernel/net/9p/9pnet_virtio.ko: kernel/net/9p/9pnet.ko kernel/a/b-ring.ko\n\
        kernel/a/b-ring.ko:\nkernel/x.ko: kernel/gone.ko\n";

    #[test]
    fn what_is_needed_comes_first_and_once() {
        let table = ModuleTable::parse(DEP, "kernel/built-in.ko\n");
        let order = table.load_order(&["9p", "built_in", "9pnet_virtio", "9p"]);
        assert_eq!(
            order.expect("resolves"),
            [
                "kernel/fs/netfs/netfs.ko.xz",
                "kernel/net/9p/9pnet.ko",
                "kernel/fs/9p/9p.ko",
                "kernel/a/b-ring.ko",
                "kernel/net/9p/9pnet_virtio.ko"
            ]
        );
    }

    #[test]
    fn a_module_that_is_lacking_is_named() {
        let table = ModuleTable::parse(DEP, "");
        assert_eq!(table.load_order(&["nvme"]), Err(NoModule("nvme".into())));
        assert_eq!(table.load_order(&["x"]), Err(NoModule("gone".into())));
    }
}
