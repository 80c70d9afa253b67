//! Authentication of the load's daemons. Each has a certificate of a CA that is dropped at the end.

use std::ffi::CStr;

use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use super::host;
use super::own::Handed;
use crate::certs::{self, Authority, CertsError, Subject};

const OWN_NAME: &str = "localhost";

/// The certificates of the daemons of a load.
pub(super) struct Identities {
    ca: Certificate,
    of: Vec<Identity>,
}

impl Identities {
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
            of: of.collect::<Result<_, CertsError>>()?,
        };
        Ok((identities, section, files))
    }

    pub(super) fn of(&self, nth: usize) -> ClientTlsConfig {
        let tls = ClientTlsConfig::new().ca_certificate(self.ca.clone()).domain_name(OWN_NAME);
        tls.identity(self.of[nth].clone())
    }
}
