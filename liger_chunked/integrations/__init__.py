"""Where the library meets the frameworks; nothing else imports them, and `import liger_chunked` does not either."""
