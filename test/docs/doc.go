// Package docs checks the pages, the dashboard and the alerts against the code: what they name exists, and what the
// code reports to users is documented. It also checks the language of the whole repository.
package docs
