package nodee2e

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"

	"github.com/gpushare/gpushare/test/controlplane"
)

// The images. They exist only in the test.
const (
	pauseImage     = "gpushare.test/pause:1"
	recordEnvImage = "gpushare.test/recordenv:1"
)

// The tests' programs are compiled only once, because a node's start has a time limit and the compiler on a busy machine
// could use it up: recordenv is the program of both images, ociruntime is containerd's runtime.
var (
	buildRecordEnv  = sync.OnceValues(func() ([]byte, error) { return buildProgram("recordenv") })
	buildOCIRuntime = sync.OnceValues(func() ([]byte, error) { return buildProgram("ociruntime") })
)

func buildProgram(name string) ([]byte, error) {
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "gpushare-"+name+"-")
	if err != nil {
		return nil, fmt.Errorf("building %s: %w", name, err)
	}
	defer os.RemoveAll(dir)
	program := filepath.Join(dir, name)
	command := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", program, "./test/nodee2e/"+name)
	command.Dir, command.Env = root, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := command.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("building %s: %w: %s", name, err, out)
	}
	return os.ReadFile(program)
}

// buildImages writes an archive with both images. Each image has one layer with one file.
func buildImages(dir string) (archive string, err error) {
	program, err := buildRecordEnv()
	if err != nil {
		return "", err
	}
	archive = filepath.Join(dir, "images.tar")
	return archive, writeImages(archive, file{"recordenv", 0o755, program},
		image{pauseImage, "pause.json", []string{"/recordenv", "-pause"}},
		image{recordEnvImage, "recordenv.json", []string{"/recordenv"}})
}

// image is a container image with one program.
type image struct {
	name, config string
	entrypoint   []string
}

// writeImages writes an archive with images that have one layer with one file.
func writeImages(archive string, program file, images ...image) error {
	layer, err := packTar(program)
	if err != nil {
		return err
	}
	content := []file{{"layer.tar", 0o644, layer}}
	var manifest []map[string]any
	for _, image := range images {
		config, err := json.Marshal(map[string]any{
			"architecture": runtime.GOARCH, "os": "linux",
			"config": map[string]any{"Entrypoint": image.entrypoint},
			"rootfs": map[string]any{"type": "layers", "diff_ids": []string{digest(layer)}},
		})
		if err != nil {
			return err
		}
		content = append(content, file{image.config, 0o644, config})
		manifest = append(manifest, map[string]any{
			"Config": image.config, "RepoTags": []string{image.name}, "Layers": []string{"layer.tar"},
		})
	}
	data, err := json.Marshal(manifest)
	if err != nil {
		return err
	}
	packed, err := packTar(append(content, file{"manifest.json", 0o644, data})...)
	if err != nil {
		return err
	}
	if err := os.WriteFile(archive, packed, 0o600); err != nil {
		return fmt.Errorf("writing the images: %w", err)
	}
	return nil
}

type file struct {
	name    string
	mode    int64
	content []byte
}

func packTar(files ...file) ([]byte, error) {
	var out bytes.Buffer
	writer := tar.NewWriter(&out)
	for _, f := range files {
		header := &tar.Header{Typeflag: tar.TypeReg, Name: f.name, Mode: f.mode, Size: int64(len(f.content))}
		if err := writer.WriteHeader(header); err != nil {
			return nil, fmt.Errorf("packing %s: %w", f.name, err)
		}
		if _, err := writer.Write(f.content); err != nil {
			return nil, fmt.Errorf("packing %s: %w", f.name, err)
		}
	}
	if err := writer.Close(); err != nil {
		return nil, fmt.Errorf("packing: %w", err)
	}
	return out.Bytes(), nil
}

func digest(data []byte) string {
	sum := sha256.Sum256(data)
	return "sha256:" + hex.EncodeToString(sum[:])
}
