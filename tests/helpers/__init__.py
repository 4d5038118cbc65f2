"""What tests share: modules, problems, references, readers; nothing here is collected."""
