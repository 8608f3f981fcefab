//! Output for people and pipes.

use std::io::Write;

/// Writes to standard output. Whoever reads it may stop early, as `head` does;
/// that ends the output, not the command.
pub(crate) fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// [`print()`] with the end of the line.
pub(crate) fn print_line(text: &str) {
    print(&format!("{text}\n"));
}

/// `1234567` as `1,234,567`.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1234567` as `1.2 MB`.
pub(crate) fn bytes(number: u64) -> String {
    let mut size = number as f64;
    for unit in ["B", "kB", "MB", "GB"] {
        if size < 1000.0 {
            return if unit == "B" { format!("{number} B") } else { format!("{size:.1} {unit}") };
        }
        size /= 1000.0;
    }
    format!("{size:.1} TB")
}

#[cfg(test)]
mod tests {
    #[test]
    fn sizes_have_units() {
        let cases = [(0, "0 B"), (999, "999 B"), (1234, "1.2 kB"), (1_234_567, "1.2 MB")];
        for (number, expected) in cases {
            assert_eq!(super::bytes(number), expected);
        }
        assert_eq!(super::bytes(5_000_000_000_000), "5.0 TB");
    }

    #[test]
    fn numbers_are_grouped_by_thousands() {
        let cases = [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")];
        for (number, expected) in cases {
            assert_eq!(super::grouped(number), expected);
        }
    }
}
