package main

import (
	"bufio"
	"debug/buildinfo"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/textproto"
	"os"
	"path"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	purl "github.com/package-url/packageurl-go"
)

// sbom holds the components of an image and their dependencies.
type sbom struct {
	version    string
	components map[string]cdx.Component
	dependsOn  map[string][]string
}

// newSBOM describes an image: the Go modules of each program, from its build information, and the Debian packages in
// /var/lib/dpkg/status.d. It contains no time and no serial number, so equal inputs give an equal document.
func newSBOM(rootfs, arch string, tag name.Tag, digest v1.Hash) (*cdx.BOM, error) {
	repository := tag.Context()
	image := cdx.Component{
		Type: cdx.ComponentTypeContainer, Name: repository.Name(), Version: tag.TagStr(),
		PackageURL: purl.NewPackageURL(purl.TypeOCI, "", path.Base(repository.RepositoryStr()), digest.String(),
			purl.QualifiersFromMap(map[string]string{"arch": arch, "repository_url": repository.Name(), "tag": tag.TagStr()}), "").String(),
	}
	image.BOMRef = image.PackageURL
	s := &sbom{version: tag.TagStr(), components: map[string]cdx.Component{}, dependsOn: map[string][]string{}}
	if err := s.addPrograms(rootfs, image.BOMRef); err != nil {
		return nil, err
	}
	if err := s.addPackages(rootfs, image.BOMRef); err != nil {
		return nil, err
	}
	return s.document(image), nil
}

// add adds a component on which parent depends. It returns the component's reference, which is its package URL.
func (s *sbom) add(parent string, kind cdx.ComponentType, name, version string, url *purl.PackageURL) string {
	ref := url.String()
	s.components[ref] = cdx.Component{BOMRef: ref, Type: kind, Name: name, Version: version, PackageURL: ref}
	if !slices.Contains(s.dependsOn[parent], ref) {
		s.dependsOn[parent] = append(s.dependsOn[parent], ref)
	}
	return ref
}

func (s *sbom) document(image cdx.Component) *cdx.BOM {
	var components []cdx.Component
	dependencies := []cdx.Dependency{}
	refs := []string{image.BOMRef}
	for ref, component := range s.components {
		components = append(components, component)
		refs = append(refs, ref)
	}
	slices.SortFunc(components, func(a, b cdx.Component) int { return strings.Compare(a.BOMRef, b.BOMRef) })
	slices.Sort(refs)
	for _, ref := range refs {
		on := s.dependsOn[ref]
		slices.Sort(on)
		dependencies = append(dependencies, cdx.Dependency{Ref: ref, Dependencies: &on})
	}
	out := cdx.NewBOM()
	out.Metadata = &cdx.Metadata{Component: &image}
	out.Components, out.Dependencies = &components, &dependencies
	return out
}

// addPrograms adds each Go program below rootfs and its modules. Other files have no build information and are skipped.
func (s *sbom) addPrograms(rootfs, image string) error {
	found := false
	err := filepath.WalkDir(rootfs, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		info, err := buildinfo.ReadFile(path)
		if err != nil {
			return nil
		}
		found = true
		s.addProgram(image, info)
		return nil
	})
	if err == nil && !found {
		err = errors.New("no Go program found")
	}
	if err != nil {
		return fmt.Errorf("reading %s: %w", rootfs, err)
	}
	return nil
}

func (s *sbom) addProgram(image string, info *debug.BuildInfo) {
	// The build sets no version of the main module. It is the image's.
	program := s.add(image, cdx.ComponentTypeApplication, path.Base(info.Path), s.version,
		golang(info.Main.Path, s.version, strings.TrimPrefix(strings.TrimPrefix(info.Path, info.Main.Path), "/")))
	toolchain := strings.TrimPrefix(info.GoVersion, "go")
	s.add(program, cdx.ComponentTypeLibrary, "stdlib", toolchain, golang("stdlib", toolchain, ""))
	for _, module := range info.Deps {
		if module.Replace != nil {
			module = module.Replace
		}
		s.add(program, cdx.ComponentTypeLibrary, module.Path, module.Version, golang(module.Path, module.Version, ""))
	}
}

func golang(module, version, subpath string) *purl.PackageURL {
	namespace, name := path.Split(module)
	return purl.NewPackageURL(purl.TypeGolang, strings.TrimSuffix(namespace, "/"), name, version, nil, subpath)
}

// addPackages adds the distribution and the packages with control data in /var/lib/dpkg/status.d, one per file. An
// image without that folder has no packages.
func (s *sbom) addPackages(rootfs, image string) error {
	records, err := filepath.Glob(filepath.Join(rootfs, "var/lib/dpkg/status.d/*"))
	if err != nil || len(records) == 0 {
		return err
	}
	id, release, err := distribution(filepath.Join(rootfs, "etc/os-release"))
	if err != nil {
		return err
	}
	s.add(image, cdx.ComponentTypeOS, id, release, purl.NewPackageURL(purl.TypeGeneric, "", id, release, nil, ""))
	for _, record := range records {
		fields, err := control(record)
		if err != nil {
			return err
		}
		name, version := fields.Get("Package"), fields.Get("Version")
		if name == "" || version == "" {
			return fmt.Errorf("%s: Package or Version is missing", record)
		}
		qualifiers := map[string]string{"arch": fields.Get("Architecture"), "distro": id + "-" + release}
		if source, _, _ := strings.Cut(fields.Get("Source"), " "); source != "" {
			qualifiers["upstream"] = source // Security trackers list source packages.
		}
		s.add(image, cdx.ComponentTypeLibrary, name, version,
			purl.NewPackageURL(purl.TypeDebian, id, name, version, purl.QualifiersFromMap(qualifiers), ""))
	}
	return nil
}

// control parses a Debian control paragraph (deb-control(5)), which has the syntax of mail headers.
func control(file string) (textproto.MIMEHeader, error) {
	in, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	fields, err := textproto.NewReader(bufio.NewReader(in)).ReadMIMEHeader()
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return fields, nil
}

// distribution returns ID and VERSION_ID of an os-release(5) file.
func distribution(file string) (id, version string, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return "", "", err
	}
	for line := range strings.Lines(string(text)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		switch value = strings.Trim(value, `"'`); key {
		case "ID":
			id = value
		case "VERSION_ID":
			version = value
		}
	}
	if id == "" || version == "" {
		return "", "", fmt.Errorf("%s: ID or VERSION_ID is missing", file)
	}
	return id, version, nil
}
