//! `laxity certs`: a CA and certificates for a trial, in one folder.
//!
//! A certificate says in a URI what it is for (`server/access.rs`), and in its extended key usage on which side of a
//! connection it may be used, so that a daemon's cannot pass for a coordinator's. A cluster that lasts gets its certificates from
//! its own PKI: what counts is the URI.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SanType, date_time_ymd,
};
use thiserror::Error;

/// Who a certificate is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    /// A daemon; the name is that of its host.
    Daemon(String),
    /// Somebody who may look.
    Viewer(String),
    /// Somebody who may change things.
    Operator(String),
    /// A coordinator: under which names and addresses it is reached.
    Coordinator(Vec<String>),
}

impl Subject {
    /// What its files are called: `NAME.crt` and `NAME.key`.
    #[must_use]
    pub fn file_stem(&self) -> String {
        match self {
            Self::Daemon(name) => format!("daemon-{name}"),
            Self::Viewer(name) => format!("viewer-{name}"),
            Self::Operator(name) => format!("operator-{name}"),
            Self::Coordinator(_) => "coordinator".into(),
        }
    }

    fn names(&self) -> &[String] {
        match self {
            Self::Daemon(name) | Self::Viewer(name) | Self::Operator(name) => {
                core::slice::from_ref(name)
            }
            Self::Coordinator(names) => names,
        }
    }
}

/// A folder that was not filled. What was written before stays.
#[derive(Debug, Error)]
pub enum CertsError {
    /// A file cannot be written or read. An existing key is never overwritten: remove it first if that is meant.
    #[error("{path}: {cause}", path = .path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What the kernel said.
        cause: std::io::Error,
    },
    /// A name cannot be in a certificate. Use letters, digits, `-`, `.` and `_`.
    #[error("`{0}` cannot be a name in a certificate; use letters, digits, `-`, `.`, `_` and `:`")]
    Name(String),
    /// The CA in the folder cannot be used, or a certificate cannot be made.
    #[error("cannot make a certificate: {0}; check ca.crt and ca.key in the folder")]
    Make(#[from] rcgen::Error),
}

const CA: &str = "ca";

/// Makes a CA in `folder` if there is none, and a certificate with its key for each subject. Gives the files that were
/// written. Keys can be read by their owner only.
///
/// # Errors
/// [`CertsError`].
pub fn make(folder: &Path, subjects: &[Subject]) -> Result<Vec<PathBuf>, CertsError> {
    for name in subjects.iter().flat_map(Subject::names) {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-._:".contains(c);
        if name.is_empty() || name.len() > 253 || !name.chars().all(plain) || name.starts_with('.')
        {
            return Err(CertsError::Name(name.clone()));
        }
    }
    let fail = |cause| CertsError::File {
        path: folder.to_owned(),
        cause,
    };
    fs::create_dir_all(folder).map_err(fail)?;
    let mut written = Vec::new();
    let issuer = authority(folder, &mut written)?;
    for subject in subjects {
        let key = KeyPair::generate()?;
        let certificate = parameters(subject)?.signed_by(&key, &issuer)?;
        let stem = folder.join(subject.file_stem());
        let (crt, secret) = (with(&stem, "crt"), with(&stem, "key"));
        write(&secret, &key.serialize_pem(), 0o600)?;
        write(&crt, &certificate.pem(), 0o644)?;
        written.extend([crt, secret]);
    }
    Ok(written)
}

/// `Path::with_extension` would take the end of a host's name for one.
fn with(stem: &Path, extension: &str) -> PathBuf {
    let mut path = stem.as_os_str().to_owned();
    path.push(".");
    path.push(extension);
    path.into()
}

/// The CA of the folder.
fn authority(
    folder: &Path,
    written: &mut Vec<PathBuf>,
) -> Result<Issuer<'static, KeyPair>, CertsError> {
    let (crt, secret) = (with(&folder.join(CA), "crt"), with(&folder.join(CA), "key"));
    let read = |path: &Path| {
        fs::read_to_string(path).map_err(|cause| CertsError::File {
            path: path.to_owned(),
            cause,
        })
    };
    if !crt.exists() && !secret.exists() {
        let mut parameters = CertificateParams::new(Vec::new())?;
        lasting(&mut parameters);
        parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        parameters
            .distinguished_name
            .push(DnType::CommonName, "Laxity trial CA");
        let issuer = CertifiedIssuer::self_signed(parameters, KeyPair::generate()?)?;
        write(&secret, &issuer.key().serialize_pem(), 0o600)?;
        write(&crt, &issuer.pem(), 0o644)?;
        written.extend([crt.clone(), secret.clone()]);
    }
    let key = KeyPair::from_pem(&read(&secret)?)?;
    Ok(Issuer::from_ca_cert_pem(&read(&crt)?, key)?)
}

/// Not for ever, and not so short that a trial ends with it.
fn lasting(parameters: &mut CertificateParams) {
    parameters.not_before = date_time_ymd(2024, 1, 1);
    parameters.not_after = date_time_ymd(2036, 1, 1);
}

fn parameters(subject: &Subject) -> Result<CertificateParams, CertsError> {
    let (uri, usage, names) = match subject {
        Subject::Daemon(name) => (
            format!("laxity://daemon/{name}"),
            ExtendedKeyUsagePurpose::ClientAuth,
            Vec::new(),
        ),
        Subject::Viewer(name) => (
            format!("laxity://viewer/{name}"),
            ExtendedKeyUsagePurpose::ClientAuth,
            Vec::new(),
        ),
        Subject::Operator(name) => (
            format!("laxity://operator/{name}"),
            ExtendedKeyUsagePurpose::ClientAuth,
            Vec::new(),
        ),
        Subject::Coordinator(names) => (
            "laxity://coordinator".to_owned(),
            ExtendedKeyUsagePurpose::ServerAuth,
            names.clone(),
        ),
    };
    let mut parameters = CertificateParams::new(names)?;
    lasting(&mut parameters);
    parameters
        .subject_alt_names
        .push(SanType::URI(uri.as_str().try_into()?));
    parameters.extended_key_usages = vec![usage];
    parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    parameters.use_authority_key_identifier_extension = true;
    parameters
        .distinguished_name
        .push(DnType::CommonName, subject.file_stem());
    Ok(parameters)
}

fn write(path: &Path, text: &str, mode: u32) -> Result<(), CertsError> {
    let made = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path);
    made.and_then(|mut file| file.write_all(text.as_bytes()))
        .map_err(|cause| CertsError::File {
            path: path.to_owned(),
            cause,
        })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn keys_are_private_and_a_second_call_adds_to_the_same_ca() {
        let folder = tempfile::tempdir().expect("a folder");
        let one = make(folder.path(), &[Subject::Daemon("a.b".into())]).expect("made");
        assert_eq!(one.len(), 4);
        for path in one
            .iter()
            .filter(|path| path.extension() == Some("key".as_ref()))
        {
            let mode = fs::metadata(path).expect("written").permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{}", path.display());
        }
        let two = make(folder.path(), &[Subject::Viewer("v".into())]).expect("made");
        assert_eq!(two.len(), 2);
        let again = make(folder.path(), &[Subject::Viewer("v".into())]);
        assert!(matches!(again, Err(CertsError::File { .. })), "{again:?}");
        let bad = make(folder.path(), &[Subject::Daemon("../x".into())]);
        assert!(matches!(bad, Err(CertsError::Name(_))), "{bad:?}");
    }
}
