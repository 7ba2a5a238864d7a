"""What people see: terminal screens and HTML pages."""
