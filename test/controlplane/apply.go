package controlplane

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/restmapper"
	"sigs.k8s.io/yaml"
)

// fieldManager is the name under which Apply owns fields.
const fieldManager = "gpushare-test"

// Apply applies manifests by server-side apply, in the given order. A path is a YAML file of one or more documents, or
// a folder, of which every *.yaml is applied in the order of names. Unknown fields are errors. An object without a
// namespace goes into "default".
func (c *ControlPlane) Apply(ctx context.Context, paths ...string) error {
	client, err := dynamic.NewForConfig(c.Config)
	if err != nil {
		return fmt.Errorf("making a client for manifests: %w", err)
	}
	mapper := restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(c.Client.Discovery()))
	for _, path := range paths {
		manifests, err := manifestFiles(path)
		if err != nil {
			return fmt.Errorf("looking for manifests: %w", err)
		}
		for _, manifest := range manifests {
			objects, err := readManifest(manifest)
			if err != nil {
				return fmt.Errorf("reading %s: %w", manifest, err)
			}
			for _, object := range objects {
				if err := apply(ctx, client, mapper, object); err != nil {
					return fmt.Errorf("applying %s %s of %s: %w", object.GetKind(), object.GetName(), manifest, err)
				}
			}
		}
	}
	return nil
}

func apply(ctx context.Context, client dynamic.Interface, mapper meta.RESTMapper, object *unstructured.Unstructured) error {
	kind := object.GroupVersionKind()
	mapping, err := mapper.RESTMapping(kind.GroupKind(), kind.Version)
	if err != nil {
		return err
	}
	var resource dynamic.ResourceInterface = client.Resource(mapping.Resource)
	if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
		namespace := object.GetNamespace()
		if namespace == "" {
			namespace = metav1.NamespaceDefault
		}
		resource = client.Resource(mapping.Resource).Namespace(namespace)
	}
	data, err := object.MarshalJSON()
	if err != nil {
		return err
	}
	force := true
	_, err = resource.Patch(ctx, object.GetName(), "application/apply-patch+yaml", data, metav1.PatchOptions{
		FieldManager: fieldManager, Force: &force, FieldValidation: metav1.FieldValidationStrict,
	})
	return err
}

func manifestFiles(path string) ([]string, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return []string{path}, nil
	}
	found, err := filepath.Glob(filepath.Join(path, "*.yaml"))
	if err == nil && len(found) == 0 {
		err = fmt.Errorf("%s holds no *.yaml", path)
	}
	slices.Sort(found)
	return found, err
}

func readManifest(path string) ([]*unstructured.Unstructured, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var objects []*unstructured.Unstructured
	documents := utilyaml.NewYAMLReader(bufio.NewReader(file))
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return objects, nil
		}
		if err != nil {
			return nil, err
		}
		var content map[string]any
		if err := yaml.Unmarshal(document, &content); err != nil {
			return nil, err
		}
		if len(content) == 0 {
			continue // Only comments.
		}
		object := &unstructured.Unstructured{Object: content}
		if !object.IsList() {
			objects = append(objects, object)
			continue
		}
		err = object.EachListItem(func(item runtime.Object) error {
			objects = append(objects, item.(*unstructured.Unstructured))
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
}
