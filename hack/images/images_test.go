package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// What the chart relies on: the extender is asked to run as somebody other than root.
func TestOurDockerfiles(t *testing.T) {
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

func TestWhatAnArchiveCouldNotHaveIsRefused(t *testing.T) {
	const good = "FROM golang AS build\nRUN x\nFROM scratch\nARG VERSION\nLABEL v=$VERSION\nCOPY --from=build /rootfs /\nENTRYPOINT [\"/x\"]\n"
	if _, err := parse(good, map[string]string{"VERSION": "1"}); err != nil {
		t.Fatalf("a good one: %v", err)
	}
	for name, test := range map[string]struct{ from, to, want string }{
		"another base":           {"FROM scratch", "FROM debian", "FROM debian"},
		"a further file":         {"ENTRYPOINT", "COPY LICENSE /\nENTRYPOINT", "COPY LICENSE"},
		"a command":              {"ENTRYPOINT", "RUN rm -rf /etc\nENTRYPOINT", "RUN rm"},
		"an environment":         {"ENTRYPOINT", "ENV A=b\nENTRYPOINT", "ENV A=b"},
		"no files":               {"COPY --from=build /rootfs /\n", "", "doesn't take /rootfs"},
		"no entry point":         {"ENTRYPOINT [\"/x\"]\n", "", "no ENTRYPOINT"},
		"an entry point of text": {"[\"/x\"]", "/x", "ENTRYPOINT /x"},
		"an argument not asked":  {"ARG VERSION\n", "", "no ARG VERSION"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parse(strings.Replace(good, test.from, test.to, 1), map[string]string{"VERSION": "1"})
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want an error with %q", err, test.want)
			}
		})
	}
}

func TestAnArchive(t *testing.T) {
	rootfs := t.TempDir()
	for _, err := range []error{
		os.MkdirAll(filepath.Join(rootfs, "usr/bin"), 0o755),
		os.WriteFile(filepath.Join(rootfs, "usr/bin/x"), []byte("x"), 0o755),
		os.Symlink("usr/bin", filepath.Join(rootfs, "bin")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	image := stage{user: "1:1", entrypoint: []string{"/x"}, labels: map[string]string{"a": "b"}}
	var one, two bytes.Buffer
	if err := errors.Join(write(&one, rootfs, "arm64", "example.com/x:v1", image), write(&two, rootfs, "arm64", "example.com/x:v1", image)); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(one.Bytes(), two.Bytes()) {
		t.Error("the same files make another archive")
	}
	files := map[string][]byte{}
	for reader := tar.NewReader(&one); ; {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if files[header.Name], err = io.ReadAll(reader); err != nil {
			t.Fatal(err)
		}
	}
	// From the index by digests to the configuration, as whoever imports it goes.
	var index struct{ Manifests []descriptor }
	var manifest struct {
		Config descriptor
		Layers []descriptor
	}
	var config struct {
		Architecture string
		Config       struct {
			User       string
			Entrypoint []string
			Labels     map[string]string
		}
	}
	decode := func(name string, into any) {
		t.Helper()
		if err := json.Unmarshal(files[name], into); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	at := func(d descriptor) string {
		t.Helper()
		name := "blobs/sha256/" + strings.TrimPrefix(d.Digest, "sha256:")
		if len(files[name]) != d.Size || digest(files[name]) != d.Digest {
			t.Fatalf("%s isn't what its digest says", name)
		}
		return name
	}
	decode("index.json", &index)
	if got := index.Manifests[0].Annotations["io.containerd.image.name"]; got != "example.com/x:v1" {
		t.Errorf("it is called %q", got)
	}
	decode(at(index.Manifests[0]), &manifest)
	decode(at(manifest.Config), &config)
	at(manifest.Layers[0])
	got := stage{user: config.Config.User, entrypoint: config.Config.Entrypoint, labels: config.Config.Labels}
	if diff := cmp.Diff(image, got, cmp.AllowUnexported(stage{})); diff != "" || config.Architecture != "arm64" {
		t.Errorf("architecture %s (-want +got)\n%s", config.Architecture, diff)
	}
}
