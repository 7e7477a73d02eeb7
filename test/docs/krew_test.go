package docs

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/gpushare/gpushare/test/check"
)

// krew's rules for a manifest (krew.sigs.k8s.io, "Writing a plugin manifest"): known fields only, the name, a semantic
// version with v, a SHA-256 for each archive, and no two platforms that match the same system.
func TestKrewManifest(t *testing.T) {
	text := read(t, "deploy/krew/inspect-gpushare.yaml")
	var manifest struct {
		APIVersion, Kind string
		Metadata         struct{ Name string }
		Spec             struct {
			Version, Homepage, ShortDescription, Description, Caveats string
			Platforms                                                 []struct {
				Selector struct{ MatchLabels map[string]string }
				URI      string
				SHA256   string
				Bin      string
			}
		}
	}
	check.Must(t, yaml.UnmarshalStrict([]byte(text), &manifest))
	spec := manifest.Spec
	if manifest.APIVersion != "krew.googlecontainertools.github.com/v1alpha2" || manifest.Kind != "Plugin" || manifest.Metadata.Name != "inspect-gpushare" {
		t.Errorf("%s %s %s", manifest.APIVersion, manifest.Kind, manifest.Metadata.Name)
	}
	if !regexp.MustCompile(`^v\d+\.\d+\.\d+$`).MatchString(spec.Version) {
		t.Errorf("version %q", spec.Version)
	}
	if spec.ShortDescription == "" || len(spec.ShortDescription) > 50 || strings.HasSuffix(spec.ShortDescription, ".") || spec.Description == "" {
		t.Errorf("descriptions %q and %q", spec.ShortDescription, spec.Description)
	}
	planned := spec.Version == "v0.0.0"
	if planned != strings.Contains(text, "PLANNED") {
		t.Errorf("version %s: a manifest says PLANNED if and only if it is not released", spec.Version)
	}
	seen := map[string]bool{}
	for _, platform := range spec.Platforms {
		labels := platform.Selector.MatchLabels
		key := labels["os"] + "_" + labels["arch"]
		if len(labels) != 2 || seen[key] {
			t.Errorf("platform %v", labels)
		}
		seen[key] = true
		if want := fmt.Sprintf("%s/releases/download/%s/kubectl-inspect-gpushare_%s.tar.gz", spec.Homepage, spec.Version, key); platform.URI != want {
			t.Errorf("uri %s, want %s", platform.URI, want)
		}
		if !regexp.MustCompile(`^[0-9a-f]{64}$`).MatchString(platform.SHA256) || planned != (strings.Trim(platform.SHA256, "0") == "") {
			t.Errorf("%s: sha256 %q", key, platform.SHA256)
		}
		if want := map[bool]string{true: "kubectl-inspect-gpushare.exe", false: "kubectl-inspect-gpushare"}[labels["os"] == "windows"]; platform.Bin != want {
			t.Errorf("%s: bin %q, want %q", key, platform.Bin, want)
		}
	}
	if len(seen) < 5 {
		t.Errorf("platforms %v", seen)
	}
}
