//! Settings from environment variables. An empty variable counts as not set. An unusable value is
//! replaced, and noted for the log.

use std::env;
use std::fmt::Display;
use std::str::FromStr;

/// The environment of a process or a test, and its unusable values.
pub struct Environment<'a> {
    get: &'a dyn Fn(&str) -> Option<String>,
    problems: Vec<String>,
}

impl<'a> Environment<'a> {
    /// Returns an environment in which `get` returns the value of each variable.
    pub fn new(get: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self { get, problems: Vec::new() }
    }

    /// Returns the environment of this process.
    pub fn of_this_process() -> Environment<'static> {
        Environment::new(&|name| Some(env::var_os(name)?.to_string_lossy().into_owned()))
    }

    /// Returns the value of a variable, or `None` if it is not set or empty.
    #[must_use]
    pub fn text(&self, name: &str) -> Option<String> {
        (self.get)(name).filter(|value| !value.is_empty())
    }

    /// Parses the value of a variable with `parse`. Returns `None` if the variable is not set or
    /// can't be parsed. `holds` describes the value that is used then.
    pub fn parsed<T, E: Display>(
        &mut self,
        name: &str,
        holds: &str,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> Option<T> {
        let text = self.text(name)?;
        match parse(&text) {
            Ok(value) => Some(value),
            Err(error) => {
                self.note(format!("{name} is `{text}`: {error}"), holds);
                None
            }
        }
    }

    /// Parses a whole number of `unit`. Returns `None` as [`Environment::parsed`] does.
    pub fn number<T: FromStr>(&mut self, name: &str, unit: &str, holds: &str) -> Option<T> {
        let expected = format!("write a whole number of {unit}");
        self.parsed(name, holds, |text| text.trim().parse().map_err(|_| expected))
    }

    /// Parses one of several named values. The first of them is the default.
    pub fn choice<T: Copy>(&mut self, name: &str, choices: &[(&str, T)]) -> T {
        let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
        let (otherwise, first) = choices[0];
        let chosen = self.parsed(name, otherwise, |text| {
            let found = choices.iter().find(|(name, _)| *name == text);
            let expected = || format!("write one of {}", names.join(", "));
            found.map(|(_, value)| *value).ok_or_else(expected)
        });
        chosen.unwrap_or(first)
    }

    /// Notes that a value can't be used. `holds` describes the value that is used instead.
    pub fn note(&mut self, problem: impl Display, holds: &str) {
        self.problems.push(format!("{problem}; going on with {holds}"));
    }

    /// Returns the notes about unusable values.
    #[must_use]
    pub fn into_problems(self) -> Vec<String> {
        self.problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_cannot_be_used_is_replaced_and_said() {
        let get = |name: &str| {
            let value = match name {
                "NUMBER" => " 7 ",
                "WORD" => "fast",
                "EMPTY" => "",
                _ => return None,
            };
            Some(value.to_owned())
        };
        let mut from = Environment::new(&get);
        let choices = [("slow", 1), ("none", 0)];
        assert_eq!(from.number("NUMBER", "bytes", "1"), Some(7));
        assert_eq!(from.number::<u32>("EMPTY", "bytes", "1"), None);
        assert_eq!(from.choice("UNSET", &choices), 1);
        assert_eq!(from.number::<u32>("WORD", "bytes", "1"), None);
        assert_eq!(from.choice("WORD", &choices), 1);
        let said = [
            "WORD is `fast`: write a whole number of bytes; going on with 1",
            "WORD is `fast`: write one of slow, none; going on with slow",
        ];
        assert_eq!(from.into_problems(), said);
    }
}
