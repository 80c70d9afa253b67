//! `laxity certs`: creates a CA and certificates for a trial in one folder.
//!
//! The URI in a certificate names its role (`server/access.rs`). The extended key usage names the
//! side of a connection, so that a daemon's certificate is not accepted as a coordinator's. A
//! permanent cluster gets certificates with such URIs from its own PKI.
//!
//! All files are written or none. They are written under temporary names and renamed when all of
//! them are on the disk. An existing file is an error, and a full disk leaves the folder as it was.

use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PublicKeyData, SanType, date_time_ymd,
};
use thiserror::Error;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use x509_parser::prelude::{FromDer, X509Certificate};

pub const DAYS_DEFAULT: u32 = 365;
pub const DAYS_MAX: u32 = 36_500;
/// Shortest validity of a CA in days, so that certificates can be added later.
const CA_DAYS: u32 = 3650;
/// Certificates are valid from this long before they are made, since clocks of hosts differ.
const BEFORE: Duration = Duration::from_secs(24 * 60 * 60);
const DAY_S: u64 = 24 * 60 * 60;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    Daemon(String),
    Viewer(String),
    /// A person or tool that may read and change.
    Operator(String),
    Coordinator(Vec<String>),
}

impl Subject {
    pub fn file_stem(&self) -> String {
        let role = self.role();
        match self.names().first() {
            Some(name) => format!("{role}-{name}"),
            None => role.to_owned(),
        }
    }

    pub const fn role(&self) -> &'static str {
        match self {
            Self::Daemon(_) => "daemon",
            Self::Viewer(_) => "viewer",
            Self::Operator(_) => "operator",
            Self::Coordinator(_) => "coordinator",
        }
    }

    pub fn names(&self) -> &[String] {
        match self {
            Self::Daemon(name) | Self::Viewer(name) | Self::Operator(name) => {
                core::slice::from_ref(name)
            }
            Self::Coordinator(names) => names,
        }
    }

    fn uri(&self) -> String {
        match self {
            Self::Coordinator(_) => "laxity://coordinator".to_owned(),
            Self::Daemon(name) | Self::Viewer(name) | Self::Operator(name) => {
                format!("laxity://{}/{name}", self.role())
            }
        }
    }

    fn check(&self) -> Result<(), CertsError> {
        if matches!(self, Self::Coordinator(names) if names.is_empty()) {
            return Err(CertsError::Name(String::new()));
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || "-._:".contains(c);
        let good = |name: &str| {
            (1..=253).contains(&name.len()) && name.chars().all(plain) && !name.starts_with('.')
        };
        match self.names().iter().find(|name| !good(name)) {
            Some(name) => Err(CertsError::Name(name.clone())),
            None => Ok(()),
        }
    }
}

/// An error by which the folder stays as it was.
#[derive(Debug, Error)]
pub enum CertsError {
    #[error("{path} cannot be written: {cause}; nothing was made: make room there or take another \
        folder, then call this again", path = .path.display())]
    File { path: PathBuf, cause: io::Error },
    #[error("{path} is there already, and nothing is overwritten; remove it first if its \
        certificate is to be replaced", path = .0.display())]
    There(PathBuf),
    #[error("{0} is named twice")]
    Twice(String),
    #[error("`{0}` cannot be a name in a certificate; use letters, digits, `-`, `.`, `_` and `:`")]
    Name(String),
    #[error("{0} days are not in 1..={DAYS_MAX}")]
    Days(u32),
    #[error("{path}: {problem}; take a new folder, or put ca.crt and ca.key of the CA that is \
        meant there", path = .path.display())]
    Authority { path: PathBuf, problem: String },
    #[error("cannot make a certificate")]
    Make(#[from] rcgen::Error),
}

fn unwritable(path: &Path) -> impl Fn(io::Error) -> CertsError {
    let path = path.to_owned();
    move |cause| CertsError::File { path: path.clone(), cause }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Made {
    /// The holder. None for the CA.
    pub subject: Option<Subject>,
    pub certificate: PathBuf,
    pub key: PathBuf,
    /// End of validity, in seconds since 1970.
    pub until_s: i64,
    pub until: String,
}

/// Converts seconds since 1970 to the library's type.
macro_rules! at {
    ($s:expr) => {
        date_time_ymd(1970, 1, 1) + Duration::from_secs($s)
    };
}

const CA: &str = "ca";

/// Creates a CA in `folder` if there is none, and a certificate and key for each subject. They are
/// valid for `days`, but no longer than the CA. Returns what was created, the CA first. Only their
/// owner can read the keys.
pub fn make(folder: &Path, subjects: &[Subject], days: u32) -> Result<Vec<Made>, CertsError> {
    if !(1..=DAYS_MAX).contains(&days) {
        return Err(CertsError::Days(days));
    }
    let mut stems = BTreeSet::new();
    for subject in subjects {
        subject.check()?;
        let stem = subject.file_stem();
        let (certificate, key) = files(folder, &stem);
        if let Some(there) = [certificate, key].into_iter().find(|path| path.exists()) {
            return Err(CertsError::There(there));
        }
        if !stems.insert(stem.clone()) {
            return Err(CertsError::Twice(stem));
        }
    }
    let (crt, secret) = files(folder, CA);
    let mut made = Vec::new();
    let mut batch = Vec::new();
    let mut add = |pem: Pem, crt: &Path, secret: &Path| {
        batch.push((secret.to_owned(), pem.key, 0o600));
        batch.push((crt.to_owned(), pem.certificate, 0o644));
    };
    let authority = if crt.exists() || secret.exists() {
        Authority::read(&crt, &secret)?
    } else {
        let (authority, pem) = Authority::new(days.max(CA_DAYS))?;
        add(pem, &crt, &secret);
        made.push(announce(None, crt, secret, authority.until_s));
        authority
    };
    for subject in subjects {
        let until_s =
            (now_s() + u64::from(days) * DAY_S).min(u64::try_from(authority.until_s).unwrap_or(0));
        let pem = authority.sign(subject, until_s)?;
        let (crt, secret) = files(folder, &subject.file_stem());
        add(pem, &crt, &secret);
        made.push(announce(Some(subject), crt, secret, until_s as i64));
    }
    let is_new = !folder.exists();
    fs::create_dir_all(folder).map_err(unwritable(folder))?;
    let put = put_all(folder, &batch);
    if put.is_err() && is_new {
        // The folder is empty, unless another process wrote a file there. Then `remove_dir` fails.
        let _ = fs::remove_dir(folder);
    }
    put.map(|()| made)
}

/// Writes all files, given as path, text and mode, into their folder, or none of them. Existing
/// files are not overwritten.
fn put_all(folder: &Path, files: &[(PathBuf, String, u32)]) -> Result<(), CertsError> {
    let mut written = Vec::new();
    for (path, text, mode) in files {
        let write = || {
            let mut file = tempfile::Builder::new()
                .prefix(".laxity-certs-")
                .permissions(Permissions::from_mode(*mode))
                .tempfile_in(folder)?;
            file.write_all(text.as_bytes())?;
            file.as_file().sync_all()?;
            Ok(file)
        };
        written.push((path, write().map_err(unwritable(path))?));
    }
    let mut named: Vec<&Path> = Vec::new();
    let name_all = || {
        for (path, file) in written {
            file.persist_noclobber(path).map_err(|persist| match persist.error.kind() {
                io::ErrorKind::AlreadyExists => CertsError::There(path.clone()),
                _ => unwritable(path)(persist.error),
            })?;
            named.push(path);
        }
        let synced = File::open(folder).and_then(|folder| folder.sync_all());
        synced.map_err(unwritable(folder))
    };
    let done = name_all();
    if done.is_err() {
        for path in named {
            let _ = fs::remove_file(path);
        }
    }
    done
}

fn announce(subject: Option<&Subject>, certificate: PathBuf, key: PathBuf, until_s: i64) -> Made {
    let day = at!(u64::try_from(until_s).unwrap_or(0));
    Made {
        subject: subject.cloned(),
        certificate,
        key,
        until_s,
        until: format!("{:04}-{:02}-{:02}", day.year(), u8::from(day.month()), day.day()),
    }
}

/// `Path::with_extension` would replace the end of a host's name.
fn files(folder: &Path, stem: &str) -> (PathBuf, PathBuf) {
    let file = |extension| folder.join(format!("{stem}.{extension}"));
    (file("crt"), file("key"))
}

struct Pem {
    certificate: String,
    key: String,
}

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    until_s: i64,
}

impl Authority {
    fn new(days: u32) -> Result<(Self, Pem), CertsError> {
        let key = KeyPair::generate()?;
        let mut parameters = CertificateParams::new(Vec::new())?;
        let until_s = now_s() + u64::from(days) * DAY_S;
        lasting(&mut parameters, until_s);
        parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        // The mark gives each CA its own name. Otherwise a certificate of another CA would be
        // refused as broken, and not as unknown.
        let identifier = parameters.key_identifier(&key);
        let mark: String = identifier.iter().take(4).map(|b| format!("{b:02x}")).collect();
        parameters.distinguished_name.push(DnType::CommonName, format!("Laxity trial CA {mark}"));
        let signed = CertifiedIssuer::self_signed(parameters, key)?;
        let pem = Pem { certificate: signed.pem(), key: signed.key().serialize_pem() };
        let issuer = Issuer::from_ca_cert_pem(&pem.certificate, KeyPair::from_pem(&pem.key)?)?;
        let until_s = until_s as i64;
        Ok((Self { issuer, until_s }, pem))
    }

    fn read(crt: &Path, secret: &Path) -> Result<Self, CertsError> {
        let fail =
            |path: &Path, problem: String| CertsError::Authority { path: path.to_owned(), problem };
        let read = |path: &Path| {
            let text = laxity_files::read_to_string(path, laxity_files::CONFIG_BYTES_MAX);
            text.map_err(|error| match error.io_kind() {
                Some(io::ErrorKind::NotFound) => {
                    fail(path, "is missing, and without it this folder's CA cannot sign".into())
                }
                _ => fail(path, format!("cannot be read: {error}")),
            })
        };
        let (certificate, key) = (read(crt)?, read(secret)?);
        let key = KeyPair::from_pem(&key).map_err(|error| fail(secret, error.to_string()))?;
        let der = CertificateDer::from_pem_slice(certificate.as_bytes())
            .map_err(|error| fail(crt, error.to_string()))?;
        let (_, parsed) =
            X509Certificate::from_der(&der).map_err(|error| fail(crt, error.to_string()))?;
        if parsed.public_key().subject_public_key.data.as_ref() != key.der_bytes() {
            return Err(fail(secret, "is not the key of ca.crt".into()));
        }
        let until_s = parsed.validity().not_after.timestamp();
        if until_s <= now_s() as i64 {
            return Err(fail(crt, "is over: its last day has passed".into()));
        }
        let issuer =
            Issuer::from_ca_cert_der(&der, key).map_err(|error| fail(crt, error.to_string()))?;
        Ok(Self { issuer, until_s })
    }

    /// Creates a certificate that is valid until `until_s`, in seconds since 1970.
    fn sign(&self, subject: &Subject, until_s: u64) -> Result<Pem, CertsError> {
        let key = KeyPair::generate()?;
        let certificate = parameters(subject, until_s)?.signed_by(&key, &self.issuer)?;
        Ok(Pem { certificate: certificate.pem(), key: key.serialize_pem() })
    }
}

fn now_s() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

fn lasting(parameters: &mut CertificateParams, until_s: u64) {
    parameters.not_before = at!(now_s().saturating_sub(BEFORE.as_secs()));
    parameters.not_after = at!(until_s);
}

fn parameters(subject: &Subject, until_s: u64) -> Result<CertificateParams, CertsError> {
    let (usage, names) = match subject {
        Subject::Coordinator(names) => (ExtendedKeyUsagePurpose::ServerAuth, names.clone()),
        _ => (ExtendedKeyUsagePurpose::ClientAuth, Vec::new()),
    };
    let mut parameters = CertificateParams::new(names)?;
    lasting(&mut parameters, until_s);
    parameters.subject_alt_names.push(SanType::URI(subject.uri().as_str().try_into()?));
    parameters.extended_key_usages = vec![usage];
    parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    parameters.use_authority_key_identifier_extension = true;
    // A common name has at most 64 characters. Nothing depends on it.
    let name: String = subject.file_stem().chars().take(64).collect();
    parameters.distinguished_name.push(DnType::CommonName, name);
    Ok(parameters)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ca_that_cannot_sign_is_told_and_certificates_end_with_theirs() {
        let (one, two) =
            (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
        let daemon = |name: &str| [Subject::Daemon(name.into())];
        let made = make(one.path(), &daemon("a"), 1).expect("made");
        let hours = (made[1].until_s - now_s() as i64) / 3600;
        assert!((23..=24).contains(&hours), "{hours}");
        let made = make(one.path(), &daemon("b"), DAYS_MAX).expect("made");
        let days = (made[0].until_s - now_s() as i64) / DAY_S as i64;
        assert!((3649..=3650).contains(&days), "{days}: no longer than its CA");
        let twice = make(one.path(), &[daemon("c"), daemon("c")].concat(), 1);
        assert!(matches!(twice, Err(CertsError::Twice(_))), "{twice:?}");

        make(two.path(), &daemon("a"), 1).expect("made");
        fs::copy(two.path().join("ca.key"), one.path().join("ca.key")).expect("copied");
        let other = make(one.path(), &daemon("c"), 1).expect_err("another's key");
        assert!(other.to_string().contains("not the key of ca.crt"), "{other}");
        fs::remove_file(one.path().join("ca.key")).expect("removed");
        let none = make(one.path(), &daemon("c"), 1).expect_err("no key");
        assert!(none.to_string().contains("is missing"), "{none}");
    }
}
