// Package docs holds the pages, the dashboard and the alerts to the code: what they name exists, and what the code tells
// its users is explained.
package docs
