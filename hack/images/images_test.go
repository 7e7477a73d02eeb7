package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	must(t, err)
	return string(data)
}

// TestSimulated: the fake driver library is only in the image with that title.
func TestSimulated(t *testing.T) {
	for _, suffix := range []string{"", "-simulated"} {
		described, err := parse(read(t, filepath.Join("..", "..", "Dockerfile.deviceplugin")), map[string]string{"SIMULATED": suffix})
		must(t, err)
		if title := described.labels["org.opencontainers.image.title"]; title != "gpushare-device-plugin"+suffix {
			t.Errorf("title %q", title)
		}
		libraries, err := filepath.Glob(filepath.Join(rootfs(t, "device-plugin"+suffix), "usr/lib/*/libnvidia-ml.so.1"))
		must(t, err)
		if found := len(libraries) > 0; found != (suffix != "") {
			t.Errorf("the image device-plugin%s has driver libraries: %v", suffix, libraries)
		}
	}
}

// rootfs returns the folder with an image's files. Its programs are empty.
func rootfs(t *testing.T, image string) string {
	t.Helper()
	if err := exec.Command("dpkg-query", "--show", "libc6:"+runtime.GOARCH).Run(); err != nil {
		t.Skipf("SKIPPED, not tested: Debian's package libc6 isn't installed: %v", err)
	}
	binaries, folder := t.TempDir(), filepath.Join(t.TempDir(), "rootfs")
	must(t, os.WriteFile(filepath.Join(binaries, "gpushare-device-plugin"), nil, 0o600))
	if out, err := exec.Command("./rootfs.sh", image, runtime.GOARCH, binaries, folder).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return folder
}

// The chart relies on the user of each image: it requires that the extender doesn't run as root.
func TestDockerfiles(t *testing.T) {
	args := map[string]string{"VERSION": "v1.2.3", "COMMIT": "abcdef"}
	for name, want := range map[string]stage{
		"extender":     {user: "65532:65532", entrypoint: []string{"/gpushare-extender"}},
		"deviceplugin": {user: "0:0", entrypoint: []string{"/usr/bin/gpushare-device-plugin"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parse(read(t, filepath.Join("..", "..", "Dockerfile."+name)), args)
			if err != nil {
				t.Fatal(err)
			}
			labels := got.labels
			got.labels = nil
			if diff := cmp.Diff(want, got, cmp.AllowUnexported(stage{})); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
			for label, value := range map[string]string{"version": "v1.2.3", "revision": "abcdef", "licenses": "Apache-2.0"} {
				if labels["org.opencontainers.image."+label] != value {
					t.Errorf("label %s is %q, want %q", label, labels["org.opencontainers.image."+label], value)
				}
			}
		})
	}
}

// Instructions that an archive can't reproduce are errors.
func TestParseErrors(t *testing.T) {
	const good = "FROM golang AS build\nRUN x\n\nFROM scratch\nARG VERSION\nLABEL v=$VERSION\nCOPY --from=build /rootfs /\nUSER 1:1\nENTRYPOINT [\"/x\"]\n"
	if _, err := parse(good, map[string]string{"VERSION": "1"}); err != nil {
		t.Fatalf("valid Dockerfile: %v", err)
	}
	for name, test := range map[string]struct{ from, to string }{
		"another base":            {"FROM scratch", "FROM debian"},
		"additional file":         {"ENTRYPOINT", "COPY LICENSE /\nENTRYPOINT"},
		"environment":             {"ENTRYPOINT", "ENV A=b\nENTRYPOINT"},
		"no files":                {"COPY --from=build /rootfs /\n", ""},
		"no entry point":          {"ENTRYPOINT [\"/x\"]\n", ""},
		"entry point not in JSON": {"[\"/x\"]", "/x"},
	} {
		if _, err := parse(strings.Replace(good, test.from, test.to, 1), nil); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// Reads the layout like a container engine: from the index by digests to configuration and layer.
func TestLayout(t *testing.T) {
	dir := t.TempDir()
	layer := filepath.Join(dir, "layer.tar")
	var packed bytes.Buffer
	writer := tar.NewWriter(&packed)
	must(t, writer.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "x", Mode: 0o755}), writer.Close(), os.WriteFile(layer, packed.Bytes(), 0o600))
	want := stage{user: "1:1", entrypoint: []string{"/x"}, labels: map[string]string{"a": "b"}}
	var indexes []string
	for _, name := range []string{"one", "two"} {
		image, err := newImage(layer, "arm64", want)
		must(t, err, writeLayout(filepath.Join(dir, name), "example.com/x:v1", "arm64", image))
		indexes = append(indexes, read(t, filepath.Join(dir, name, "index.json")))
	}
	if indexes[0] != indexes[1] {
		t.Errorf("two different images from the same layer:\n%s\n%s", indexes[0], indexes[1])
	}

	index, err := layout.ImageIndexFromPath(filepath.Join(dir, "one"))
	must(t, err, validate.Index(index))
	manifest, err := index.IndexManifest()
	must(t, err)
	entry := manifest.Manifests[0]
	if got := entry.Annotations["io.containerd.image.name"]; got != "example.com/x:v1" || entry.Platform.String() != "linux/arm64" {
		t.Errorf("the index names image %q for %s", got, entry.Platform)
	}
	image, err := index.Image(entry.Digest)
	must(t, err)
	config, err := image.ConfigFile()
	must(t, err)
	got := stage{user: config.Config.User, entrypoint: config.Config.Entrypoint, labels: config.Config.Labels}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(stage{})); diff != "" || config.Platform().String() != "linux/arm64" {
		t.Errorf("platform %s (-want +got)\n%s", config.Platform(), diff)
	}
}

// Scanners need the C library's version and the distribution.
func TestDevicePluginPackages(t *testing.T) {
	folder := rootfs(t, "device-plugin")
	out, err := exec.Command("dpkg-query", "--show", "--showformat=${Version}", "libc6:"+runtime.GOARCH).Output()
	must(t, err)
	record := read(t, filepath.Join(folder, "var/lib/dpkg/status.d/libc6"))
	for _, want := range []string{"Package: libc6\n", "Version: " + string(out) + "\n"} {
		if !strings.Contains(record, want) {
			t.Errorf("no %q in %q", want, record)
		}
	}
	if release := read(t, filepath.Join(folder, "etc/os-release")); !strings.Contains(release, "\nID=") || !strings.Contains(release, "\nVERSION_ID=") {
		t.Errorf("no distribution in %q", release)
	}
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}
