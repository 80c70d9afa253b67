//! The manual page of a configuration file.

/// Returns the roff source of a configuration file's page. It shows `sample`, which has all keys
/// with their defaults. `path` is the file's place, and `see` the other pages.
pub fn configuration_page(
    program: &str,
    version: &str,
    path: &str,
    sample: &str,
    see: &str,
) -> String {
    format!(
        ".TH {program}.toml 5 \"\" \"{program} {version}\"\n\
         .SH NAME\n{program}.toml \\- configuration of {program}\n\
         .SH SYNOPSIS\n{path}\n\
         .SH DESCRIPTION\nA TOML file; optional, as every key in it. \
         This is all of it, with the defaults:\n.PP\n.nf\n{}.fi\n\
         .SH \"SEE ALSO\"\n{see}\n",
        verbatim(sample)
    )
}

/// Escapes text so that roff shows it unchanged.
fn verbatim(text: &str) -> String {
    text.lines()
        .map(|line| {
            let line = line.replace('\\', "\\e").replace('-', "\\-");
            // `\&` keeps roff from taking the line for a roff request.
            let mark = if line.starts_with(['.', '\'']) { "\\&" } else { "" };
            format!("{mark}{line}\n")
        })
        .collect()
}
