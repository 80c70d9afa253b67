//! The section `[web]` of the configuration, and its check.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::nonsense::Nonsense;

/// The section `[web]` of the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WebConfig {
    /// Address of the web page. Empty for none.
    pub listen: String,
    /// Whether to serve other hosts. The page has neither TLS nor passwords, so everybody who
    /// reaches the address can read it.
    pub insecure: bool,
    /// Names by which browsers may ask for the page beside addresses and `localhost`, such as that
    /// of a proxy.
    pub names: Vec<String>,
}

impl WebConfig {
    /// Returns the address of the web page, if there is one.
    pub fn address(&self) -> Option<SocketAddr> {
        self.listen.parse().ok()
    }

    pub(crate) fn check(&self) -> Result<(), Nonsense> {
        let fail = |problem: String| Err(Nonsense::new("web.listen", problem));
        match self.address() {
            None if self.listen.is_empty() => Ok(()),
            None => fail(format!("`{}` is no address; write 127.0.0.1:7473", self.listen)),
            Some(address) if !address.ip().is_loopback() && !self.insecure => fail(format!(
                "{address} is reachable from other hosts, and the page has neither TLS nor \
                 passwords; listen on 127.0.0.1 and reach it by ssh -L or a proxy, or set \
                 web.insecure = true if everybody there may look"
            )),
            Some(_) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_hosts_are_shown_the_page_only_if_that_is_asked_for() {
        let config = |listen: &str, insecure| WebConfig {
            listen: listen.into(),
            insecure,
            names: Vec::new(),
        };
        assert!(config("", false).check().is_ok());
        assert!(config("127.0.0.1:0", false).check().is_ok());
        assert!(config("0.0.0.0:80", true).check().is_ok());
        let error = config("0.0.0.0:80", false).check().expect_err("refused");
        assert!(error.to_string().contains("web.insecure = true"), "{error}");
        assert!(config("nonsense", false).check().is_err());
    }
}
