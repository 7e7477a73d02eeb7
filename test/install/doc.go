// Package install tests the installation: the Helm chart and the plain manifests that are rendered from it, on a real control
// plane. The project's programs run as the installed objects specify, with their pods' own tokens.
package install
