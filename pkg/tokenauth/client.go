package tokenauth

import (
	"context"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
)

// api is the part of the API server that a Reviewer uses. Both methods return the review with its status.
type api interface {
	ReviewToken(ctx context.Context, review *authenticationv1.TokenReview) (*authenticationv1.TokenReview, error)
	ReviewAccess(ctx context.Context, review *authorizationv1.SubjectAccessReview) (*authorizationv1.SubjectAccessReview, error)
}

// client implements api with a REST client. client-go's typed clientset would link all kinds of Kubernetes into the device
// plugin, which costs more memory on each GPU node than the rest of the plugin.
type client struct{ rest.Interface }

func newClient(config *rest.Config) (client, error) {
	scheme := runtime.NewScheme()
	scheme.AddKnownTypes(authenticationv1.SchemeGroupVersion, &authenticationv1.TokenReview{})
	scheme.AddKnownTypes(authorizationv1.SchemeGroupVersion, &authorizationv1.SubjectAccessReview{})
	metav1.AddToGroupVersion(scheme, metav1.Unversioned) // An error is a Status.
	config = rest.CopyConfig(config)
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	c, err := rest.UnversionedRESTClientFor(config)
	return client{c}, err
}

func (c client) ReviewToken(ctx context.Context, review *authenticationv1.TokenReview) (*authenticationv1.TokenReview, error) {
	answer := &authenticationv1.TokenReview{}
	err := c.Post().AbsPath("/apis/authentication.k8s.io/v1/tokenreviews").Body(review).Do(ctx).Into(answer)
	return answer, err
}

func (c client) ReviewAccess(ctx context.Context, review *authorizationv1.SubjectAccessReview) (*authorizationv1.SubjectAccessReview, error) {
	answer := &authorizationv1.SubjectAccessReview{}
	err := c.Post().AbsPath("/apis/authorization.k8s.io/v1/subjectaccessreviews").Body(review).Do(ctx).Into(answer)
	return answer, err
}
