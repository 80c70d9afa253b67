//! Where a decision service is, and how long it may take.

use std::time::Duration;

use hyper::Uri;

/// A decision service.
#[derive(Clone)]
pub struct Endpoint {
    pub(crate) uri: Uri,
    pub(crate) host: String,
    pub(crate) port: u16,
    /// The model that is asked for.
    pub model: String,
    /// Sent as a bearer token, where there is one.
    pub key: Option<String>,
    /// What an answer may take, from connecting to its last byte.
    pub timeout: Duration,
}

impl std::fmt::Debug for Endpoint {
    /// Without the key: it must not get into a log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint")
            .field("uri", &self.uri)
            .field("model", &self.model)
            .field("key", &self.key.is_some())
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

/// A text is not the address of a decision service.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadEndpoint {
    /// Not an address.
    #[error(
        "`{url}` is no address of a decision service: {why}; give one like http://10.0.0.7:8000/v1"
    )]
    Address {
        /// What was given.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// TLS.
    #[error(
        "`{0}`: a decision service is asked over plain HTTP; run a proxy on this host that speaks \
         TLS, and give http://127.0.0.1:PORT/v1"
    )]
    Tls(String),
    /// A key that no header can have.
    #[error("the key of the decision service has characters that no HTTP header may have")]
    Key,
    /// A key without a character.
    #[error("the key of the decision service is empty; give one, or none at all")]
    NoKey,
}

impl Endpoint {
    /// The path that a base address is completed by.
    const PATH: &str = "/chat/completions";

    /// `url` is the base that clients of such services are given (`http://host:8000/v1`), the host
    /// alone, or the full address of `/chat/completions`.
    ///
    /// # Errors
    /// If it is no such address.
    pub fn new(url: &str, model: &str, timeout: Duration) -> Result<Self, BadEndpoint> {
        let bad = |why: String| BadEndpoint::Address {
            url: url.to_owned(),
            why,
        };
        let given: Uri = url
            .trim()
            .parse()
            .map_err(|error: hyper::http::uri::InvalidUri| bad(error.to_string()))?;
        match given.scheme_str() {
            Some("http") => {}
            Some("https") => return Err(BadEndpoint::Tls(url.to_owned())),
            _ => return Err(bad("it has to begin with http://".to_owned())),
        }
        if given.query().is_some() {
            return Err(bad("it has a query".to_owned()));
        }
        let authority = given
            .authority()
            .filter(|authority| !authority.host().is_empty())
            .ok_or_else(|| bad("it names no host".to_owned()))?;
        if authority.as_str().contains('@') {
            return Err(bad("it has a user in it".to_owned()));
        }
        let base = given.path().trim_end_matches('/');
        let path = match base {
            "" => format!("/v1{}", Self::PATH),
            whole if whole.ends_with(Self::PATH) => whole.to_owned(),
            base => format!("{base}{}", Self::PATH),
        };
        // An IPv6 address is in brackets in a URL, and without them for the resolver.
        let host = authority.host().trim_matches(['[', ']']).to_owned();
        let port = match authority.as_str().strip_prefix(authority.host()) {
            Some("") => 80,
            // `Authority` lets a port through that is no number.
            _ => authority
                .port_u16()
                .filter(|port| *port > 0)
                .ok_or_else(|| bad("its port is no number from 1 to 65535".to_owned()))?,
        };
        let uri = Uri::builder()
            .scheme("http")
            .authority(authority.clone())
            .path_and_query(path)
            .build()
            .map_err(|error| bad(error.to_string()))?;
        Ok(Self {
            uri,
            host,
            port,
            model: model.to_owned(),
            key: None,
            timeout,
        })
    }

    /// With a key, sent as `Authorization: Bearer …`.
    ///
    /// # Errors
    /// If no header can carry it, or there is nothing in it.
    pub fn with_key(mut self, key: &str) -> Result<Self, BadEndpoint> {
        if key.trim().is_empty() {
            return Err(BadEndpoint::NoKey);
        }
        hyper::header::HeaderValue::from_str(key).map_err(|_| BadEndpoint::Key)?;
        self.key = Some(key.to_owned());
        Ok(self)
    }

    /// The address that is asked.
    #[must_use]
    pub fn address(&self) -> String {
        self.uri.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(url: &str) -> Result<Endpoint, BadEndpoint> {
        Endpoint::new(url, "model", Duration::from_secs(1))
    }

    #[test]
    fn a_base_a_host_and_a_full_address_are_the_same_service() {
        for url in [
            "http://host:8000",
            "http://host:8000/",
            "http://host:8000/v1",
            "http://host:8000/v1/",
            "http://host:8000/v1/chat/completions",
        ] {
            let endpoint = of(url).expect("an address");
            assert_eq!(endpoint.address(), "http://host:8000/v1/chat/completions");
            assert_eq!((endpoint.host.as_str(), endpoint.port), ("host", 8000));
        }
        let six = of("http://[::1]/api").expect("an address");
        assert_eq!(six.address(), "http://[::1]/api/chat/completions");
        assert_eq!((six.host.as_str(), six.port), ("::1", 80));
    }

    #[test]
    fn what_is_no_address_is_said_with_what_to_give() {
        for url in [
            "",
            "host:8000",
            "ftp://host",
            "http://",
            "http://u@host",
            "http://h/v1?x=1",
            "http://h:x",
            "http://h:",
            "http://h:0",
            "http://h:70000",
        ] {
            let error = of(url).expect_err(url).to_string();
            assert!(error.contains("http://10.0.0.7:8000/v1"), "{error}");
        }
        let tls = of("https://api.example.com/v1").expect_err("TLS");
        assert!(tls.to_string().contains("proxy"), "{tls}");
    }

    #[test]
    fn a_key_is_in_no_log() {
        let endpoint = of("http://h").expect("an address");
        let secret = endpoint.clone().with_key("sk-1").expect("a header");
        assert!(!format!("{secret:?}").contains("sk-1"));
        for (key, error) in [
            ("a\nb", BadEndpoint::Key),
            ("", BadEndpoint::NoKey),
            (" ", BadEndpoint::NoKey),
        ] {
            assert_eq!(endpoint.clone().with_key(key).expect_err(key), error);
        }
    }
}
