// Package install tests what an administrator installs: the Helm chart and the plain manifests rendered from it, on a
// real control plane, with the project's programs run as the installed objects say, under their pods' own tokens.
package install
