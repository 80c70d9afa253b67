//! Results of checks, for `laxity doctor` and the coordinator's page: what a check found, why it
//! matters and what to do.

use serde::Serialize;

/// The severity of a finding. Only an error makes `laxity doctor` fail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The check found no problem.
    #[default]
    Ok,
    /// Information, or something that could not be found out.
    Info,
    /// It works, but not as well as it could.
    Warn,
    /// It does not work.
    Error,
}

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The name of the check, such as `gid`. It stays the same, for scripts.
    pub id: &'static str,
    /// How bad it is.
    pub severity: Severity,
    /// The device or process that the finding is about. Empty for the host.
    pub subject: String,
    /// What the check found.
    pub found: String,
    /// Why the finding matters. Empty if all is well.
    pub why: String,
    /// What to do: a command, where there is one. Empty if nothing is needed.
    pub action: String,
}

impl Finding {
    /// Creates a finding of the check `id`, without a reason and without something to do.
    #[must_use]
    pub fn new(id: &'static str, severity: Severity, found: impl Into<String>) -> Self {
        Self { id, severity, found: found.into(), ..Self::default() }
    }

    /// Creates a finding that all is well.
    #[must_use]
    pub fn ok(id: &'static str, found: impl Into<String>) -> Self {
        Self::new(id, Severity::Ok, found)
    }

    /// Creates a finding of something to know.
    #[must_use]
    pub fn info(id: &'static str, found: impl Into<String>) -> Self {
        Self::new(id, Severity::Info, found)
    }

    /// Creates a warning.
    #[must_use]
    pub fn warn(id: &'static str, found: impl Into<String>) -> Self {
        Self::new(id, Severity::Warn, found)
    }

    /// Creates an error.
    #[must_use]
    pub fn error(id: &'static str, found: impl Into<String>) -> Self {
        Self::new(id, Severity::Error, found)
    }

    /// Sets the device or process that the finding is about.
    #[must_use]
    pub fn about(mut self, subject: impl Into<String>) -> Self {
        self.subject = subject.into();
        self
    }

    /// Sets why the finding matters.
    #[must_use]
    pub fn because(mut self, why: impl Into<String>) -> Self {
        self.why = why.into();
        self
    }

    /// Sets what to do.
    #[must_use]
    pub fn action(mut self, action: impl Into<String>) -> Self {
        self.action = action.into();
        self
    }
}
