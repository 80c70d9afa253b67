//! Explanations of TLS errors: the cause, and the setting that has to change.
//!
//! tonic, hyper and h2 each wrap an error, as in "transport error", so only the innermost cause
//! says what happened. This module recognizes a cause by its text, because some of these layers
//! keep only the text.

use std::error::Error;
use std::fmt;

/// The names of the settings, as the user writes them.
#[derive(Clone, Copy, Debug)]
pub struct SettingNames {
    /// The setting of the authority that issues the coordinator's certificate.
    pub ca: &'static str,
    /// The setting of this side's certificate.
    pub cert: &'static str,
    /// The setting of the key of this side's certificate.
    pub key: &'static str,
    /// The setting of the name in the coordinator's certificate.
    pub server_name: &'static str,
    /// The setting of the coordinator's URL.
    pub endpoint: &'static str,
}

impl SettingNames {
    /// The names of command-line options.
    pub const OPTIONS: Self = Self {
        ca: "--ca",
        cert: "--cert",
        key: "--key",
        server_name: "--server-name",
        endpoint: "--endpoint",
    };
}

/// The cause of an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// The text of the innermost error.
    pub text: String,
    /// The remedy, for an error of TLS.
    pub hint: Option<String>,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.hint {
            Some(hint) => write!(f, "{}; {hint}", self.text),
            None => f.write_str(&self.text),
        }
    }
}

/// Returns the innermost cause of an error.
pub fn cause(error: &dyn Error, settings: &SettingNames) -> Cause {
    let mut text = error.to_string();
    let mut inner = error.source();
    while let Some(error) = inner {
        text = error.to_string();
        inner = error.source();
    }
    let hint = hint(&text, settings);
    Cause { text, hint }
}

/// Returns the remedy for an error with this text, if it is one of TLS.
fn hint(text: &str, settings: &SettingNames) -> Option<String> {
    let SettingNames { ca, cert, key, server_name, endpoint } = settings;
    let has = |mark: &str| text.contains(mark);
    let alert = has("alert: ");
    let hint = if has("CertificateRequired") {
        format!("the coordinator wants a certificate: set {cert} and {key}")
    } else if has("alert: UnknownCA") {
        format!("the coordinator does not know the CA that signed {cert}")
    } else if has("alert: CertificateExpired") {
        format!("{cert} has expired, or is not valid yet: renew it, or set this host's clock")
    } else if alert && (has("ProtocolVersion") || has("HandshakeFailure")) {
        format!("it speaks another TLS than this: is {endpoint} a laxity-coordinator?")
    } else if alert {
        format!("the coordinator refuses {cert}; its log says why")
    } else if has("UnknownIssuer") {
        format!("{ca} is not who signed the coordinator's certificate")
    } else if has("not valid for name") || has("NotValidForName") {
        format!(
            "set {server_name} to a name that is in the coordinator's certificate, or use one in \
             {endpoint}"
        )
    } else if has("certificate expired") || has(": Expired") {
        "the coordinator's certificate has expired: renew it there, or set this host's clock".into()
    } else if has("certificate not valid yet") || has("NotValidYet") {
        "the coordinator's certificate is not valid yet: is this host's clock right?".into()
    } else if has("extended key usage") || has("InvalidPurpose") {
        "the coordinator shows a certificate that is not for servers: give it one of its own".into()
    } else if has("CaUsedAsEndEntity") {
        "the coordinator shows the certificate of a CA: give it one of its own".into()
    } else if has("InvalidContentType") {
        "it does not speak TLS there: is it http://, or another port?".into()
    } else {
        return None;
    };
    Some(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: SettingNames = SettingNames::OPTIONS;

    #[derive(Debug, thiserror::Error)]
    #[error("transport error")]
    struct Wrapped(#[source] tokio_rustls::rustls::Error);

    #[test]
    fn the_innermost_cause_is_told_with_what_to_do() {
        use tokio_rustls::rustls::pki_types::UnixTime;
        use tokio_rustls::rustls::{AlertDescription, CertificateError, Error, InvalidMessage};
        let at = |seconds| UnixTime::since_unix_epoch(std::time::Duration::from_secs(seconds));
        let expired = CertificateError::ExpiredContext { time: at(2), not_after: at(1) };
        let early = CertificateError::NotValidYetContext { time: at(1), not_before: at(2) };
        for (error, words) in [
            (Error::AlertReceived(AlertDescription::CertificateRequired), "set --cert and --key"),
            (Error::AlertReceived(AlertDescription::UnknownCA), "signed --cert"),
            (Error::AlertReceived(AlertDescription::CertificateExpired), "--cert has expired"),
            (Error::AlertReceived(AlertDescription::BadCertificate), "refuses --cert"),
            (CertificateError::UnknownIssuer.into(), "--ca is not who"),
            (expired.into(), "has expired: renew it there"),
            (CertificateError::Expired.into(), "has expired: renew it there"),
            (early.into(), "is this host's clock right"),
            (CertificateError::NotValidForName.into(), "set --server-name"),
            (CertificateError::InvalidPurpose.into(), "not for servers"),
            (InvalidMessage::InvalidContentType.into(), "does not speak TLS there"),
        ] {
            let said = cause(&Wrapped(error), &SETTINGS).to_string();
            assert!(said.contains(words), "{words}: {said}");
            assert!(!said.contains("transport error"), "{said}");
        }
    }
}
