//! Authentication of the load's daemons. For a running coordinator, one certificate names all of
//! them. For the load's own, each has a certificate of a CA that is dropped at the end.

use std::collections::HashSet;
use std::ffi::CStr;
use std::path::PathBuf;

use laxity_credentials::Certificates;
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use super::host;
use super::own::Handed;
use crate::certs::{self, Authority, CertsError, Subject};

/// The name in the certificate of the load's own coordinator.
const OWN_NAME: &str = "localhost";

/// PEM files for a running coordinator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadFiles {
    /// Path of the CA that signed the coordinator's certificate.
    pub ca: PathBuf,
    /// Path of a certificate with a URI `laxity://daemon/load-…` for each daemon. `laxity certs
    /// --load N` makes one.
    pub cert: PathBuf,
    /// Path of the certificate's private key.
    pub key: PathBuf,
    /// The name in the coordinator's certificate, if it is not that of the endpoint.
    pub server_name: Option<String>,
}

/// The certificates of the daemons of a load.
pub(super) struct Identities {
    ca: Certificate,
    server_name: Option<String>,
    /// One certificate for all daemons, or one for each.
    of: Vec<Identity>,
}

impl Identities {
    /// Reads the certificates from files, and checks that the certificate names all daemons.
    pub(super) fn read(files: &LoadFiles, daemons: usize) -> Result<Self, String> {
        let text = |unusable: laxity_credentials::Unusable| unusable.to_string();
        let cert = Certificates::read("--cert", &files.cert).map_err(text)?;
        let key = laxity_credentials::read("--key", &files.key).map_err(text)?;
        let leaf = &cert.all[0];
        let named: HashSet<String> = laxity_credentials::uris(leaf).into_iter().collect();
        let wanted = Subject::Load(daemons).uris();
        if let Some(missing) = wanted.iter().find(|uri| !named.contains(*uri)) {
            return Err(format!(
                "{} does not name {missing}, one of the {daemons} daemons of this load; make one \
                 that does with `laxity certs --load {daemons}`, or take fewer --daemons",
                files.cert.display()
            ));
        }
        Ok(Self {
            ca: Certificate::from_pem(Certificates::read("--ca", &files.ca).map_err(text)?.pem),
            server_name: files.server_name.clone(),
            of: vec![Identity::from_pem(cert.pem, key)],
        })
    }

    /// Creates a CA and a certificate for each daemon. Returns them with the coordinator's `[tls]`
    /// section and the memory files that the section names.
    pub(super) fn throw_away(daemons: usize) -> Result<(Self, String, Vec<Handed>), CertsError> {
        let (authority, ca) = Authority::new(1)?;
        let until_s = certs::now_s() + 24 * 60 * 60;
        let server = authority.sign(&Subject::Coordinator(vec![OWN_NAME.into()]), until_s)?;
        let hand = |name: &'static CStr, text: &str| {
            Handed::new(name, text).map_err(|cause| CertsError::File {
                path: name.to_string_lossy().into_owned().into(),
                cause,
            })
        };
        let files = vec![
            hand(c"ca.crt", &ca.certificate)?,
            hand(c"coordinator.crt", &server.certificate)?,
            hand(c"coordinator.key", &server.key)?,
        ];
        let section = format!(
            "[tls]\nclient_ca = {:?}\ncert = {:?}\nkey = {:?}\n",
            files[0].path, files[1].path, files[2].path,
        );
        let of = (0..daemons).map(|nth| {
            let pem = authority.sign(&Subject::Daemon(host(nth)), until_s)?;
            Ok(Identity::from_pem(pem.certificate, pem.key))
        });
        let identities = Self {
            ca: Certificate::from_pem(ca.certificate),
            server_name: Some(OWN_NAME.into()),
            of: of.collect::<Result<_, CertsError>>()?,
        };
        Ok((identities, section, files))
    }

    /// Returns the TLS settings of daemon `nth`.
    pub(super) fn of(&self, nth: usize) -> ClientTlsConfig {
        let mut tls = ClientTlsConfig::new().ca_certificate(self.ca.clone());
        if let Some(identity) = self.of.get(nth).or_else(|| self.of.first()) {
            tls = tls.identity(identity.clone());
        }
        match &self.server_name {
            Some(name) => tls.domain_name(name),
            None => tls,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_has_to_name_every_daemon_of_the_load() {
        let folder = tempfile::tempdir().expect("a folder");
        let made = certs::make(folder.path(), &[Subject::Load(3)], 1).expect("made");
        let files = LoadFiles {
            ca: made[0].certificate.clone(),
            cert: made[1].certificate.clone(),
            key: made[1].key.clone(),
            server_name: None,
        };
        assert!(Identities::read(&files, 3).is_ok());
        let error = Identities::read(&files, 4).err().expect("one is missing");
        assert!(
            error.contains("laxity://daemon/load-00003") && error.contains("--load 4"),
            "{error}"
        );
    }
}
