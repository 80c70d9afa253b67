//! Checks whether the peer will accept a certificate.
//!
//! The peer needs a valid date, a known issuer, the right extended key usage and, from a daemon,
//! the URI of its host. This module makes the same checks with the same verifier (webpki), so that
//! `--check-config` and `--check` find errors early. The peer's authorities are unknown on this
//! side. So they are assumed to be the trusted ones here, or a certificate behind the leaf in the
//! file.

use std::sync::Arc;

use tokio_rustls::rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use tokio_rustls::rustls::{CertificateError, Error as TlsError, RootCertStore};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use crate::{Certificates, Unusable};

/// The side of a connection that shows a certificate.
#[derive(Clone, Copy, Debug)]
pub enum Side<'a> {
    /// A daemon, which shows its certificate to a coordinator.
    Client {
        /// The URI that the certificate needs: `laxity://daemon/HOST`.
        uri: &'a str,
    },
    /// A coordinator, which shows its certificate to all peers.
    Server {
        /// Names and addresses by which peers reach the coordinator. It may be empty.
        names: &'a [&'a str],
    },
}

impl Side<'_> {
    const fn role(self) -> &'static str {
        match self {
            Self::Client { .. } => "daemon",
            Self::Server { .. } => "coordinator",
        }
    }

    /// Returns the setting of the peer's authorities for this certificate.
    const fn peers_setting(self) -> &'static str {
        match self {
            Self::Client { .. } => "the coordinator's tls.client_ca",
            Self::Server { .. } => "the daemons' coordinator.ca",
        }
    }
}

/// Checks `shown`, a leaf with its chain, as a peer that trusts `trusted` does at `now`.
///
/// # Errors
/// The peer would refuse the certificate, or `trusted` holds no authority.
pub fn check(
    shown: &Certificates<'_>,
    trusted: &Certificates<'_>,
    side: Side<'_>,
    now: UnixTime,
) -> Result<(), Unusable> {
    let mut authorities = Vec::new();
    for der in &trusted.all {
        let authority = parse(trusted, der)?;
        if may_sign(&authority) {
            authorities.push(authority.subject().to_string());
        }
    }
    if authorities.is_empty() {
        return Err(trusted.unusable(
            &"holds no certificate of an authority (CA); give the one that signed the peer's \
                certificate",
        ));
    }
    let leaf = parse(shown, &shown.all[0])?;
    check_purpose(&leaf, side).map_err(|problem| shown.unusable(&problem))?;
    check_dates(&leaf, now).map_err(|problem| shown.unusable(&problem))?;
    verify(shown, trusted, side, now).map_err(|error| {
        let problem = match error {
            Rejection::Tls(TlsError::InvalidCertificate(CertificateError::UnknownIssuer)) => {
                format!(
                    "was signed by `{}`, which is not in {} ({}: `{}`), nor behind the certificate \
                     in this file; take a certificate of that authority. If {} names another \
                     authority on purpose, append its certificate to this file",
                    leaf.issuer(),
                    trusted.key,
                    trusted.path.display(),
                    authorities.join("`, `"),
                    side.peers_setting(),
                )
            }
            Rejection::Tls(error) => {
                format!("peers will refuse it: {error}; take another certificate")
            }
            Rejection::Name(name, error) => format!(
                "daemons that are sent to `{name}` will refuse it: {error}; make one with that name"
            ),
        };
        shown.unusable(&problem)
    })
}

fn parse<'d>(
    file: &Certificates<'_>,
    der: &'d CertificateDer<'_>,
) -> Result<X509Certificate<'d>, Unusable> {
    let parsed = X509Certificate::from_der(der);
    let (_, parsed) = parsed
        .map_err(|error| file.unusable(&format!("holds a certificate that is broken ({error})")))?;
    Ok(parsed)
}

/// Reports whether a certificate is an authority or signed by itself, which peers may trust, too.
fn may_sign(certificate: &X509Certificate<'_>) -> bool {
    certificate.is_ca() || certificate.subject() == certificate.issuer()
}

fn names<'c>(certificate: &'c X509Certificate<'_>) -> &'c [GeneralName<'c>] {
    let names = certificate.subject_alternative_name().ok().flatten();
    names.map_or(&[], |names| &names.value.general_names)
}

fn uris_of<'c>(certificate: &'c X509Certificate<'_>) -> Vec<&'c str> {
    let names = names(certificate).iter();
    let uris = names.filter_map(|name| match name {
        GeneralName::URI(uri) => Some(*uri),
        _ => None,
    });
    uris.collect()
}

/// Returns the URIs that a certificate names. A certificate that can't be read has none.
pub fn uris(certificate_der: &[u8]) -> Vec<String> {
    let Ok((_, certificate)) = X509Certificate::from_der(certificate_der) else {
        return Vec::new();
    };
    let uris = uris_of(&certificate).into_iter();
    uris.map(str::to_owned).collect()
}

/// Checks that the certificate is for this side of a connection.
fn check_purpose(leaf: &X509Certificate<'_>, side: Side<'_>) -> Result<(), String> {
    let role = side.role();
    if leaf.is_ca() {
        return Err(format!(
            "begins with the certificate of an authority (CA), `{}`; give the {role}'s own \
             certificate, with those that lead to its authority behind it",
            leaf.subject()
        ));
    }
    let names = names(leaf);
    let uris = uris_of(leaf);
    let usage = leaf.extended_key_usage().ok().flatten();
    let allows = |client: bool| {
        usage.as_ref().is_none_or(|usage| match client {
            true => usage.value.client_auth,
            false => usage.value.server_auth,
        })
    };
    match side {
        Side::Client { .. } if !allows(true) => Err(
            "is not for clients (its extended key usage lacks clientAuth); take one that is, as \
             `laxity certs --daemon` makes them"
                .into(),
        ),
        Side::Client { uri } if !uris.contains(&uri) => {
            let of_laxity: Vec<&str> =
                uris.into_iter().filter(|uri| uri.starts_with("laxity://")).collect();
            let has = match of_laxity.as_slice() {
                [] => "no laxity:// URI".to_owned(),
                some => format!("only {}", some.join(", ")),
            };
            Err(format!(
                "has {has} among its names, and this host needs {uri}; take this host's \
                 certificate, or set coordinator.host to the host that it is for"
            ))
        }
        Side::Server { .. } if !allows(false) => Err(
            "is not for servers (its extended key usage lacks serverAuth); take one that is, as \
             `laxity certs --coordinator` makes them"
                .into(),
        ),
        Side::Server { .. } => {
            let reachable = |name: &GeneralName<'_>| {
                matches!(name, GeneralName::DNSName(_) | GeneralName::IPAddress(_))
            };
            match names.iter().any(reachable) {
                true => Ok(()),
                false => Err(
                    "has no DNS name and no address among its names (subjectAltName), so no daemon \
                     accepts it; make one with the names by which daemons reach this coordinator"
                        .into(),
                ),
            }
        }
        Side::Client { .. } => Ok(()),
    }
}

fn check_dates(leaf: &X509Certificate<'_>, now: UnixTime) -> Result<(), String> {
    let validity = leaf.validity();
    let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
    let clock = "or set the clock if that is wrong";
    if validity.not_after.timestamp() < now {
        return Err(format!(
            "has expired: it was good until {}; renew it, {clock}",
            validity.not_after
        ));
    }
    if validity.not_before.timestamp() > now {
        return Err(format!(
            "is not valid yet: it is good from {}; wait, take another one, {clock}",
            validity.not_before
        ));
    }
    Ok(())
}

enum Rejection {
    Tls(TlsError),
    Name(String, TlsError),
}

impl From<TlsError> for Rejection {
    fn from(error: TlsError) -> Self {
        Self::Tls(error)
    }
}

/// Verifies the certificate with rustls, as the other side does.
fn verify(
    shown: &Certificates<'_>,
    trusted: &Certificates<'_>,
    side: Side<'_>,
    now: UnixTime,
) -> Result<(), Rejection> {
    let (leaf, chain) = (&shown.all[0], &shown.all[1..]);
    let mut roots = RootCertStore::empty();
    for authority in &trusted.all {
        roots.add(authority.clone())?;
    }
    for behind in chain {
        let parsed = X509Certificate::from_der(behind);
        if parsed.is_ok_and(|(_, parsed)| may_sign(&parsed) && parsed.subject() == parsed.issuer())
        {
            roots.add(behind.clone())?;
        }
    }
    let provider = Arc::new(default_provider());
    match side {
        Side::Client { .. } => {
            WebPkiClientVerifier::builder_with_provider(roots.into(), provider)
                .build()
                .map_err(|error| TlsError::General(error.to_string()))?
                .verify_client_cert(leaf, chain, now)?;
        }
        Side::Server { names } => {
            let parsed = ParsedCertificate::try_from(leaf)?;
            let algorithms = provider.signature_verification_algorithms.all;
            verify_server_cert_signed_by_trust_anchor(&parsed, &roots, chain, now, algorithms)?;
            for name in names {
                let server = ServerName::try_from(*name)
                    .map_err(|error| TlsError::General(error.to_string()))?;
                verify_server_name(&parsed, &server)
                    .map_err(|error| Rejection::Name((*name).to_owned(), error))?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;
    use std::time::Duration;

    use rcgen::{
        BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose,
        IsCa, KeyPair, SanType, date_time_ymd,
    };

    use super::*;

    const HOST: &str = "laxity://daemon/a";
    /// 2026-07-01, in seconds since 1970.
    const NOW: u64 = 1_782_864_000;

    struct Pki {
        folder: tempfile::TempDir,
        issuer: CertifiedIssuer<'static, KeyPair>,
    }

    fn leaf(uris: &[&str], names: &[&str], usage: &[ExtendedKeyUsagePurpose]) -> CertificateParams {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut leaf = CertificateParams::new(names).unwrap();
        for uri in uris {
            let uri = SanType::URI((*uri).try_into().unwrap());
            leaf.subject_alt_names.push(uri);
        }
        leaf.extended_key_usages = usage.to_vec();
        leaf.not_before = date_time_ymd(2026, 1, 1);
        leaf.not_after = date_time_ymd(2027, 1, 1);
        leaf
    }

    fn daemon() -> CertificateParams {
        leaf(&[HOST], &[], &[ExtendedKeyUsagePurpose::ClientAuth])
    }

    fn coordinator() -> CertificateParams {
        let usage = [ExtendedKeyUsagePurpose::ServerAuth];
        leaf(&["laxity://coordinator"], &["coord1"], &usage)
    }

    impl Pki {
        fn new(name: &str) -> Self {
            let mut ca = CertificateParams::new(Vec::new()).unwrap();
            ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            ca.distinguished_name.push(DnType::CommonName, name);
            let issuer = CertifiedIssuer::self_signed(ca, KeyPair::generate().unwrap()).unwrap();
            let folder = tempfile::tempdir().unwrap();
            fs::write(folder.path().join("ca.crt"), issuer.pem()).unwrap();
            Self { folder, issuer }
        }

        fn ca(&self) -> PathBuf {
            self.folder.path().join("ca.crt")
        }

        fn sign(&self, leaf: &CertificateParams) -> PathBuf {
            let key = KeyPair::generate().unwrap();
            let signed = leaf.signed_by(&key, &self.issuer).unwrap();
            let path = self.folder.path().join("leaf.crt");
            fs::write(&path, signed.pem()).unwrap();
            path
        }
    }

    fn checked(shown: &std::path::Path, ca: &std::path::Path, side: Side<'_>) -> String {
        let shown = Certificates::read("cert", shown).unwrap();
        let trusted = Certificates::read("ca", ca).unwrap();
        let now = UnixTime::since_unix_epoch(Duration::from_secs(NOW));
        match check(&shown, &trusted, side, now) {
            Ok(()) => "good".into(),
            Err(unusable) => unusable.to_string(),
        }
    }

    #[test]
    fn a_daemons_certificate_that_its_coordinator_would_refuse_is_told_before() {
        let pki = Pki::new("ours");
        let side = Side::Client { uri: HOST };
        let said = |leaf: &CertificateParams| checked(&pki.sign(leaf), &pki.ca(), side);
        assert_eq!(said(&daemon()), "good");
        assert_eq!(said(&leaf(&[HOST], &[], &[])), "good", "no usage is any");

        let mut expired = daemon();
        expired.not_after = date_time_ymd(2026, 6, 1);
        let mut early = daemon();
        early.not_before = date_time_ymd(2026, 8, 1);
        let mut authority = daemon();
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let client = [ExtendedKeyUsagePurpose::ClientAuth];
        for (leaf, words) in [
            (expired, "has expired: it was good until Jun  1"),
            (early, "is not valid yet: it is good from Aug  1"),
            (authority, "certificate of an authority (CA)"),
            (coordinator(), "lacks clientAuth"),
            (leaf(&["laxity://daemon/b"], &[], &client), "only laxity://daemon/b"),
            (leaf(&[], &["a"], &client), "no laxity:// URI"),
        ] {
            let said = said(&leaf);
            assert!(said.contains(words), "{words}: {said}");
            assert!(said.starts_with("cert: ") && said.contains("leaf.crt"), "{said}");
        }
    }

    #[test]
    fn a_coordinators_certificate_that_daemons_would_refuse_is_told_before() {
        let pki = Pki::new("ours");
        let names = ["coord1"];
        let side = Side::Server { names: &names };
        let said = |leaf: &CertificateParams| checked(&pki.sign(leaf), &pki.ca(), side);
        assert_eq!(said(&coordinator()), "good");
        let server = [ExtendedKeyUsagePurpose::ServerAuth];
        for (leaf, words) in [
            (daemon(), "lacks serverAuth"),
            (leaf(&["laxity://coordinator"], &[], &server), "no DNS name"),
            (leaf(&[], &["coord2"], &server), "sent to `coord1`"),
        ] {
            let said = said(&leaf);
            assert!(said.contains(words), "{words}: {said}");
        }
        let ca = checked(&pki.ca(), &pki.ca(), side);
        assert!(ca.contains("certificate of an authority (CA)"), "{ca}");
    }

    #[test]
    fn another_authority_is_told_unless_the_file_leads_to_it() {
        let (ours, theirs) = (Pki::new("ours"), Pki::new("theirs"));
        for (side, leaf) in
            [(Side::Client { uri: HOST }, daemon()), (Side::Server { names: &[] }, coordinator())]
        {
            let path = theirs.sign(&leaf);
            let said = checked(&path, &ours.ca(), side);
            for word in ["CN=theirs", "CN=ours", "append its certificate"] {
                assert!(said.contains(word), "{word}: {said}");
            }
            let chain = fs::read_to_string(&path).unwrap() + &theirs.issuer.pem();
            fs::write(&path, chain).unwrap();
            assert_eq!(checked(&path, &ours.ca(), side), "good");
            // A leaf is no authority.
            let said = checked(&path, &ours.sign(&daemon()), side);
            assert!(said.starts_with("ca: ") && said.contains("no certificate of an authority"));
        }
    }
}
