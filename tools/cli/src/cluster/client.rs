//! The connection to a coordinator: its address, certificates, timeout and error messages.

use std::error::Error as _;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use laxity_credentials::explain::{self, Settings};
use laxity_credentials::{Certificates, private_key};
use laxity_wire::v1::operator_client::OperatorClient;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Response, Status};

/// Environment variable that names the coordinator, as `--endpoint` does.
const ENDPOINT_ENV: &str = "LAXITY_COORDINATOR";
/// The endpoint of a coordinator with the default configuration.
const ENDPOINT_DEFAULT: &str = "http://127.0.0.1:7471";
/// Longest answer in bytes. A thousand batches with long host names fit.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Names of the options in TLS errors.
const SETTINGS: Settings = Settings::OPTIONS;

/// Where the coordinator is and how it knows us.
#[derive(Debug, Args)]
pub(crate) struct Coordinator {
    /// URL of the coordinator; it begins with https:// if the coordinator uses TLS
    #[arg(long, value_name = "URL", env = ENDPOINT_ENV, default_value = ENDPOINT_DEFAULT)]
    endpoint: String,
    /// How long to wait for an answer, in milliseconds
    #[arg(
        long, value_name = "MS", default_value_t = 5000,
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    timeout_ms: u64,
    /// Certificate of the authority that signed the coordinator's certificate (PEM)
    #[arg(long, value_name = "FILE", env = "LAXITY_CA", help_heading = "TLS")]
    ca: Option<PathBuf>,
    /// Certificate of this client, with the role viewer or operator (PEM)
    #[arg(long, value_name = "FILE", env = "LAXITY_CERT", requires = "key", help_heading = "TLS")]
    cert: Option<PathBuf>,
    /// Private key of --cert (PEM)
    #[arg(long, value_name = "FILE", env = "LAXITY_KEY", requires = "cert", help_heading = "TLS")]
    key: Option<PathBuf>,
    /// Name in the coordinator's certificate, if it differs from the endpoint (behind a tunnel,
    /// say)
    #[arg(long, value_name = "NAME", help_heading = "TLS")]
    server_name: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

impl Coordinator {
    fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms)
    }

    /// Returns the endpoint's URL. An empty variable counts as unset.
    fn url(&self) -> &str {
        match self.endpoint.as_str() {
            "" => ENDPOINT_DEFAULT,
            url => url,
        }
    }

    fn endpoint(&self) -> Result<Endpoint> {
        let wrong = || {
            format!(
                "`{}` is no endpoint; write http://HOST:PORT, or https:// where the coordinator \
                 serves with TLS",
                self.endpoint
            )
        };
        let url = self.url().to_owned();
        let endpoint = Endpoint::from_shared(url).with_context(wrong)?;
        let uri = endpoint.uri();
        let tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => bail!(wrong()),
        };
        if uri.host().is_none() {
            bail!(wrong());
        }
        let endpoint = endpoint
            .connect_timeout(self.timeout())
            .http2_keep_alive_interval(Duration::from_secs(20))
            .keep_alive_while_idle(true);
        if tls {
            let tls = self.tls()?;
            return endpoint
                .tls_config(tls)
                .context("these certificates cannot be used: check --ca, --cert and --key");
        }
        if given(&self.ca).is_some() || given(&self.cert).is_some() {
            bail!(
                "certificates are of no use with http://; write https:// in --endpoint or \
                 ${ENDPOINT_ENV}"
            );
        }
        Ok(endpoint)
    }

    fn tls(&self) -> Result<ClientTlsConfig> {
        let ca = given(&self.ca).ok_or_else(|| {
            anyhow!("https:// needs --ca FILE (or $LAXITY_CA): the authority of the cluster")
        })?;
        let ca = Certificates::read(SETTINGS.ca, ca)?;
        ca.roots()?;
        let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca.pem));
        if let (Some(cert), Some(path)) = (given(&self.cert), given(&self.key)) {
            let cert = Certificates::read(SETTINGS.cert, cert)?;
            let key = laxity_credentials::read(SETTINGS.key, path)?;
            private_key(SETTINGS.key, path, &key)?;
            tls = tls.identity(Identity::from_pem(cert.pem, key));
        }
        if let Some(name) = &self.server_name {
            tls = tls.domain_name(name);
        }
        Ok(tls)
    }

    /// Connects and runs `work` with the client on this thread.
    pub(crate) fn run<T, W>(&self, work: impl FnOnce(Client) -> W) -> Result<T>
    where
        W: Future<Output = Result<T>>,
    {
        let endpoint = self.endpoint()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("cannot start the runtime")?;
        runtime.block_on(async {
            let channel = endpoint.connect().await.map_err(|error| self.unreachable(&error))?;
            let operator = OperatorClient::new(channel).max_decoding_message_size(ANSWER_BYTES_MAX);
            work(Client { operator, timeout: self.timeout() }).await
        })
    }

    fn unreachable(&self, error: &tonic::transport::Error) -> anyhow::Error {
        let cause = explain::cause(error, &SETTINGS);
        let next = match (cause.hint, self.url().starts_with("https:")) {
            (Some(hint), _) => hint,
            (None, true) => {
                "does laxity-coordinator run there, and does it serve with TLS? (--endpoint, \
                 $LAXITY_COORDINATOR)"
                    .into()
            }
            (None, false) => format!(
                "does laxity-coordinator run there (systemctl status laxity-coordinator), and is \
                 the endpoint right? One that serves with TLS wants https:// (--endpoint, \
                 ${ENDPOINT_ENV})"
            ),
        };
        anyhow!("cannot reach the coordinator at {}: {}; {next}", self.url(), cause.text)
    }
}

fn given(path: &Option<PathBuf>) -> Option<&Path> {
    path.as_deref().filter(|path| !path.as_os_str().is_empty())
}

/// A connection to a coordinator.
pub(crate) struct Client {
    pub(crate) operator: OperatorClient<Channel>,
    timeout: Duration,
}

impl Client {
    /// Returns the answer, or an error if it does not come in time.
    pub(crate) async fn answer<T>(
        &self,
        asked: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T> {
        match tokio::time::timeout(self.timeout, asked).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => Err(refused(&status)),
            Err(_) => bail!(
                "the coordinator did not answer within {:?}; look at its log and load, or wait \
                 longer with --timeout-ms",
                self.timeout
            ),
        }
    }
}

/// Returns the error message for a status.
pub(crate) fn refused(status: &Status) -> anyhow::Error {
    if status.source().is_some() {
        return cut(status);
    }
    let said = super::tables::clean(status.message());
    match status.code() {
        Code::NotFound | Code::InvalidArgument | Code::FailedPrecondition => anyhow!("{said}"),
        Code::PermissionDenied => anyhow!(
            "the coordinator does not allow this: {said}; changes need a certificate of role \
             operator (--cert, --key)"
        ),
        Code::Unauthenticated => anyhow!(
            "the coordinator does not know us: {said}; give a certificate of its authority \
             (--cert, --key)"
        ),
        Code::Unimplemented => anyhow!(
            "this is no laxity-coordinator, or an older one than this command; check --endpoint \
             and `laxity-coordinator --version` there"
        ),
        Code::Unavailable => anyhow!(
            "the coordinator went away: {said}; it may be restarting, or another one leads now: \
             try again"
        ),
        code => anyhow!("the coordinator failed ({code:?}): {said}; its log has more"),
    }
}

/// Returns the error message for a connection that broke during a request. In TLS 1.3 a client
/// learns only then that it was refused.
fn cut(status: &Status) -> anyhow::Error {
    let cause = explain::cause(status, &SETTINGS);
    let text = super::tables::clean(&cause.text);
    match cause.hint {
        Some(hint) => anyhow!("the coordinator did not let us in: {text}; {hint}"),
        None => anyhow!(
            "the connection to the coordinator broke: {text}; it may be restarting, or serve with \
             TLS and want https:// in --endpoint: try again, and look at its log"
        ),
    }
}
