package main

import (
	"fmt"
	"os"
	"path"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// newImage returns an image with one layer, the tar file at layer. It has no times: equal inputs give equal images.
func newImage(layer, arch string, s stage) (v1.Image, error) {
	files, err := tarball.LayerFromFile(layer, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, fmt.Errorf("reading the layer: %w", err)
	}
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err = mutate.ConfigFile(image, &v1.ConfigFile{
		Architecture: arch, OS: "linux",
		Config: v1.Config{User: s.user, Entrypoint: s.entrypoint, Labels: s.labels},
		RootFS: v1.RootFS{Type: "layers"},
	})
	if err != nil {
		return nil, err
	}
	if image, err = mutate.AppendLayers(image, files); err != nil {
		return nil, err
	}
	return mutate.Annotations(image, s.labels).(v1.Image), nil
}

// writeLayout writes the image with this name to dir as an OCI image layout. It replaces the content of dir.
func writeLayout(dir, name, arch string, image v1.Image) error {
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("removing the previous layout: %w", err)
	}
	out, err := layout.Write(dir, empty.Index)
	if err != nil {
		return fmt.Errorf("writing the layout: %w", err)
	}
	err = out.AppendImage(image,
		layout.WithPlatform(v1.Platform{Architecture: arch, OS: "linux"}),
		// containerd and Docker read the first annotation, other tools the second one (OCI image specification).
		layout.WithAnnotations(map[string]string{
			"io.containerd.image.name":          name,
			"org.opencontainers.image.ref.name": path.Base(name),
		}))
	if err != nil {
		return fmt.Errorf("writing the image: %w", err)
	}
	return nil
}
